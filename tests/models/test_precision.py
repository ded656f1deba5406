"""Precision of loaded weights, and that other settings reach the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hacrl.config.schema import AgentSettings, Precision
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.loading import load_model_config, torch_precision
from hacrl.models.logprobs import response_logprobs
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING

PAIRS = [(PROMPTS[which % 3], response) for which, response in enumerate(RESPONSES)]


def saved(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    agent = sharpened(char_agent(), 5.0)
    agent.model.to(dtype)
    agent.save(folder / "char")
    return folder / "char"


def load(folder: Path, **options: Any) -> Agent:
    return Agent.load(AgentSettings(name="ada", model=str(folder), **options), "cpu")


def logprobs(agent: Agent) -> Tensor:
    with torch.no_grad():
        return response_logprobs(agent.model, PAIRS, SAMPLING, agent.device)[0]


@pytest.mark.parametrize(
    ("precision", "stored", "device", "expected"),
    [
        ("auto", torch.float32, "cpu", torch.float32),
        ("auto", torch.bfloat16, "cpu", torch.float32),
        ("auto", torch.float16, "cpu", torch.float32),
        ("auto", torch.float32, "cuda", torch.float32),
        ("auto", torch.bfloat16, "cuda", torch.bfloat16),
        ("auto", torch.bfloat16, "cuda:1", torch.bfloat16),
        ("auto", torch.float16, "cuda", torch.bfloat16),  # masters make up for the fewer digits
        ("float32", torch.bfloat16, "cuda", torch.float32),
        ("bfloat16", torch.float32, "cpu", torch.bfloat16),
        ("bfloat16", torch.float32, "cuda", torch.bfloat16),
    ],
)
def test_precision_rule(
    tmp_path: Path, precision: Precision, stored: torch.dtype, device: str, expected: torch.dtype
) -> None:
    settings = AgentSettings(name="ada", model=str(saved(tmp_path, stored)), precision=precision)
    assert torch_precision(settings, load_model_config(settings), device) is expected


def test_a_config_without_dtype_means_float32(tmp_path: Path) -> None:
    settings = AgentSettings(name="ada", model=str(saved(tmp_path)))
    config = load_model_config(settings)
    config.dtype = None
    assert torch_precision(settings, config, "cuda") is torch.float32


@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_have_the_configured_precision(
    tmp_path: Path, stored: torch.dtype, precision: Precision
) -> None:
    folder = saved(tmp_path, stored)
    model = load(folder, precision=precision).model
    held = torch.bfloat16 if precision == "bfloat16" else torch.float32
    assert {p.dtype for p in model.parameters()} == {held}
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, original[name].to(held))


def test_log_probabilities_are_float32_whatever_the_weights(tmp_path: Path) -> None:
    """log-softmax in bfloat16 would give numbers 2**-7 apart between 2 and 4."""
    folder = saved(tmp_path)
    agent = load(folder, precision="bfloat16")
    values = logprobs(agent)
    assert values.dtype == torch.float32
    with torch.no_grad():
        ids = torch.tensor([[*PROMPTS[0], *RESPONSES[0]]])
        logits = agent.model(ids).logits
    assert logits.dtype == torch.bfloat16
    expected = logits[0, 1:3].float().log_softmax(dim=-1)[[0, 1], list(RESPONSES[0])]
    torch.testing.assert_close(values[0, :2], expected, atol=0.05, rtol=0)  # other padding, other rounding
    assert not torch.equal(values, values.to(torch.bfloat16).float())


def test_a_bfloat16_sampler_and_learner_agree_within_bfloat16(tmp_path: Path) -> None:
    agent = load(saved(tmp_path), precision="bfloat16")
    rollouts = sample_rollouts(
        TransformersEngine(agent), [problem("1+1:"), problem("3:")], 4, Sampling(8), seed=0
    )
    pairs = [(agent.encode_prompt(one.problem), one.token_ids) for one in rollouts]
    with torch.no_grad():
        values, _ = response_logprobs(agent.model, pairs, Sampling(8), agent.device)
    gaps = [
        abs(value - sampled)
        for row, one in zip(values.tolist(), rollouts, strict=True)
        for value, sampled in zip(row, one.token_logprobs, strict=False)
    ]
    assert len(gaps) > 20
    assert sum(gaps) / len(gaps) < 0.02  # logits of a few units are 2**-7 to 2**-6 apart


def test_attention_reaches_the_model_and_changes_no_number(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    default, eager, sdpa = load(folder), load(folder, attention="eager"), load(folder, attention="sdpa")
    assert eager.model.config._attn_implementation == "eager"
    assert sdpa.model.config._attn_implementation == "sdpa"
    assert default.model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(logprobs(eager), logprobs(sdpa), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["fast", "flash_attention_9", "flash_attention_2"])
def test_unknown_attention_is_refused(tmp_path: Path, attention: str) -> None:
    with pytest.raises(ModelError, match=r"agent 'ada': cannot load model .*(?i:attention|attn)"):
        load(saved(tmp_path), attention=attention)


def test_the_configured_revision_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub cache with two revisions, laid out as the hub client does: no network is needed."""
    hub = tmp_path / "hub"
    for commit, name, seed in (("a" * 40, "main", 1), ("b" * 40, "v2", 2)):
        snapshot = hub / "models--ada--tiny" / "snapshots" / commit
        char_agent(seed=seed).save(snapshot)
        refs = hub / "models--ada--tiny" / "refs"
        refs.mkdir(exist_ok=True)
        (refs / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    for revision, seed in ((None, 1), ("main", 1), ("v2", 2), ("b" * 40, 2)):
        settings = AgentSettings(name="ada", model="ada/tiny", revision=revision)
        loaded = Agent.load(settings, "cpu").model.state_dict()
        expected = char_agent(seed=seed).model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    with pytest.raises(
        ModelError, match=r"agents\.ada\.model: 'ada/tiny' \(revision 'v3'\) is not in the local"
    ):
        Agent.load(AgentSettings(name="ada", model="ada/tiny", revision="v3"), "cpu")


REMOTE_CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class HouseConfig(Qwen3Config):
    model_type = "house"


class HouseForCausalLM(Qwen3ForCausalLM):
    config_class = HouseConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output
"""


def with_own_code(folder: Path) -> Path:
    """A model whose architecture transformers does not know."""
    import json

    saved(folder)
    config = json.loads((folder / "char" / "config.json").read_text())
    config |= {
        "model_type": "house",
        "architectures": ["HouseForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_house.HouseConfig",
            "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
        },
    }
    (folder / "char" / "config.json").write_text(json.dumps(config))
    (folder / "char" / "modeling_house.py").write_text(REMOTE_CODE)
    return folder / "char"


def test_remote_code_runs_only_if_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    plain = load(saved(tmp_path / "plain"))
    folder = with_own_code(tmp_path)
    with pytest.raises(ModelError, match=r"set agents\.ada\.trust_remote_code=true"):
        load(folder)
    agent = load(folder, trust_remote_code=True)
    assert type(agent.model).__name__ == "HouseForCausalLM"
    ids = torch.tensor([[*PROMPTS[0], *RESPONSES[0]]])
    assert torch.equal(agent.model(ids).logits, 2 * plain.model(ids).logits)
