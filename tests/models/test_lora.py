"""Adapters: no initial effect, the only trained weights, and the reference policy without them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, LearningSettings, LoraSettings, NaiveSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.models.reference_policy import AdaptersOff, FrozenCopy, make_reference
from hacrl.training.learner import Learner
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.forward import plain_logprobs
from tests.support.sevens import problem
from tests.support.tiny import absolute_agent, char_agent, pair_agent, pair_tokenizer, sharpened
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING, sample

MAKERS = {"char": char_agent, "pair": pair_agent, "absolute": absolute_agent}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All tiny agents, saved, by their names."""
    for make in MAKERS.values():
        agent = sharpened(make(), 5.0)
        agent.save(tmp_path / agent.name)
    return tmp_path


def load(model: Path, lora: LoraSettings | None = None, seed: int = 0, **options: Any) -> Agent:
    return Agent.load(AgentSettings(name="ada", model=str(model), lora=lora, **options), "cpu", seed)


def adapted(model: Path, seed: int = 0, **options: Any) -> Agent:
    return load(model, LoraSettings(rank=2, alpha=8.0), seed, **options)


def logprobs(model: Any) -> Tensor:
    """Of all handmade responses, one after the other, by plain forward passes."""
    with torch.no_grad():
        pairs = [(PROMPTS[which % 3], response) for which, response in enumerate(RESPONSES)]
        return torch.cat([plain_logprobs(model, *pair, SAMPLING) for pair in pairs]).float()


def adapters(agent: Agent) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in agent.model.named_parameters() if "lora_" in name}


def base(agent: Agent) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in agent.model.named_parameters() if "lora_" not in name}


def learner_of(agent: Agent, kl: float = 0.1, lr: float = 1e-2) -> Learner:
    method = make_method(NaiveSettings(clip_low=0.9, clip_high=9.0, kl_coefficient=kl))
    return Learner(agent, method, LearningSettings(lr=lr, max_grad_norm=1e9), SAMPLING)


def train(learner: Learner, updates: int = 3) -> list[float]:
    """A few updates towards some responses and away from others; the losses."""
    samples = [sample(learner.agent, which, 1.0, (-1.0) ** which) for which in range(4)]
    return [learner.learn(samples, updates=1, seed=seed).losses[0] for seed in range(updates)]


@pytest.mark.parametrize("name", MAKERS)
def test_fresh_adapters_change_nothing(folder: Path, name: str) -> None:
    assert torch.equal(logprobs(adapted(folder / name).model), logprobs(load(folder / name).model))


@pytest.mark.parametrize("name", MAKERS)
def test_only_adapters_are_trained(folder: Path, name: str) -> None:
    agent = adapted(folder / name)
    assert {n for n, p in agent.model.named_parameters() if p.requires_grad} == set(adapters(agent))
    before_base, before = base(agent), adapters(agent)
    train(learner_of(agent))
    assert all(torch.equal(value, before_base[name]) for name, value in base(agent).items())
    # three Adam steps of 1e-2 each; A moves once B is no longer zero
    moved = {name: float((value - before[name]).abs().max()) for name, value in adapters(agent).items()}
    assert all(change > 5e-3 for change in moved.values())


def test_every_linear_layer_but_the_head_gets_adapters_of_the_rank_asked_for(folder: Path) -> None:
    agent = load(folder / "char", LoraSettings(rank=3))
    shapes = {name: tuple(value.shape) for name, value in adapters(agent).items()}
    assert len(shapes) == 2 * 2 * len(LINEAR)  # A and B in each of 2 layers
    for name, shape in shapes.items():
        assert name.split(".")[-4] in LINEAR
        assert shape[0 if "lora_A" in name else 1] == 3


@pytest.mark.parametrize("targets", ["q_proj", ("q_proj",)])
def test_layers_can_be_named(folder: Path, targets: str | tuple[str, ...]) -> None:
    agent = load(folder / "char", LoraSettings(targets=targets))
    assert {name.split(".")[-4] for name in adapters(agent)} == {"q_proj"}


def test_an_adapter_adds_its_product_scaled_by_alpha_over_rank(folder: Path) -> None:
    agent, plain = adapted(folder / "pair"), load(folder / "pair")
    with torch.no_grad():
        for name, parameter in agent.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.cos(torch.arange(parameter.numel()) + len(name)).view_as(parameter))
    values, weights = adapters(agent), dict(plain.model.named_parameters())
    with torch.no_grad():
        for name in [name for name in values if "lora_A" in name]:
            target = name.removeprefix("base_model.model.").replace("lora_A.default.", "")
            product = values[name.replace("lora_A", "lora_B")] @ values[name]
            weights[target].add_(product, alpha=8.0 / 2)
    assert not torch.allclose(logprobs(agent.model), logprobs(load(folder / "pair").model), atol=0.1)
    torch.testing.assert_close(logprobs(agent.model), logprobs(plain.model), atol=1e-4, rtol=1e-4)


def test_the_seed_decides_the_adapters_and_leaves_the_global_stream_alone(folder: Path) -> None:
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = adapters(adapted(folder / "char", seed=7))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(5)
    again, other = adapters(adapted(folder / "char", seed=7)), adapters(adapted(folder / "char", seed=8))
    assert all(torch.equal(again[name], value) for name, value in first.items())
    down = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(other[name], first[name]) for name in down)


@pytest.mark.parametrize("name", MAKERS)
def test_with_adapters_off_the_model_is_what_it_was(folder: Path, name: str) -> None:
    agent = adapted(folder / name)
    reference = make_reference(agent.model)
    assert isinstance(reference, AdaptersOff)
    before = logprobs(agent.model)
    train(learner_of(agent))
    after = logprobs(agent.model)
    assert float((after - before).abs().max()) > 0.05
    with reference.policy() as model:
        assert torch.equal(logprobs(model), before)
    assert torch.equal(logprobs(agent.model), after)  # and adapters are enabled again, and trained
    assert {n for n, p in agent.model.named_parameters() if p.requires_grad} == set(adapters(agent))


def test_adapters_are_on_again_after_an_error(folder: Path) -> None:
    agent = adapted(folder / "char")
    train(learner_of(agent))
    after = logprobs(agent.model)
    with pytest.raises(RuntimeError, match="broken"), make_reference(agent.model).policy():
        raise RuntimeError("broken")
    assert torch.equal(logprobs(agent.model), after)


def test_the_kl_term_is_the_one_to_a_frozen_copy_of_the_base(folder: Path) -> None:
    """The same learner, once with adapters off and once with the base model in memory beside it."""
    off, beside = learner_of(adapted(folder / "char"), kl=2.0), learner_of(adapted(folder / "char"), kl=2.0)
    beside._reference = FrozenCopy(load(folder / "char").model)
    losses = train(off, updates=4)
    assert losses == pytest.approx(train(beside, updates=4), rel=1e-6)
    for name, value in adapters(off.agent).items():
        torch.testing.assert_close(value, adapters(beside.agent)[name], atol=1e-6, rtol=1e-5)
    without = train(learner_of(adapted(folder / "char"), kl=0.0), updates=4)
    assert abs(losses[-1] - without[-1]) > 0.01  # the term is not negligible


def test_a_copy_is_kept_where_all_weights_are_trained(folder: Path) -> None:
    agent = load(folder / "char")
    reference = make_reference(agent.model)
    assert isinstance(reference, FrozenCopy)
    before = logprobs(agent.model)
    train(learner_of(agent))
    with reference.policy() as model:
        assert torch.equal(logprobs(model), before)
        pairs = [(PROMPTS[0], RESPONSES[0])]
        assert not response_logprobs(model, pairs, SAMPLING, agent.device)[0].requires_grad


@pytest.mark.parametrize("name", MAKERS)
def test_the_saved_folder_is_a_plain_model_and_the_adapters_beside_it(folder: Path, name: str) -> None:
    agent = adapted(folder / name)
    learner = learner_of(agent)
    train(learner)
    trained = logprobs(agent.model)
    agent.save(folder / "out")
    merged = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert not any("lora" in key for key in load_file(folder / "out" / "model.safetensors"))
    torch.testing.assert_close(logprobs(merged), trained, atol=1e-5, rtol=0)
    plain = AutoModelForCausalLM.from_pretrained(folder / name)
    assert float((logprobs(plain) - trained).abs().max()) > 0.05
    with_adapter = PeftModel.from_pretrained(plain, folder / "out" / "adapter").eval()
    torch.testing.assert_close(logprobs(with_adapter), trained, atol=1e-6, rtol=0)
    again = load(folder / "out")  # as an agent to train further
    torch.testing.assert_close(logprobs(again.model), trained, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_goes_on_after_saving_as_if_nothing_had_been(folder: Path, precision: str) -> None:
    saved, untouched = (learner_of(adapted(folder / "char", precision=precision)) for _ in range(2))
    train(saved)
    train(untouched)
    before = saved.agent.model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    saved.agent.save(folder / "out")
    after = saved.agent.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert train(saved) == train(untouched)
    state = untouched.agent.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in saved.agent.model.state_dict().items())


def test_a_bfloat16_base_has_float32_adapters_and_is_saved_in_bfloat16(folder: Path) -> None:
    agent = adapted(folder / "pair", precision="bfloat16")
    assert {value.dtype for value in base(agent).values()} == {torch.bfloat16}
    assert {value.dtype for value in adapters(agent).values()} == {torch.float32}
    learner = learner_of(agent, lr=1e-5)
    before = adapters(agent)
    train(learner)
    # Adam's first step is the learning rate, whatever the gradient: 1e-5 does not vanish
    ups = [name for name in before if "lora_B" in name]
    assert all(1e-5 < float(adapters(agent)[name].abs().max()) < 4e-5 for name in ups)
    agent.save(folder / "out")
    saved = load_file(folder / "out" / "model.safetensors")
    assert {value.dtype for value in saved.values()} == {torch.bfloat16}
    # merged in float32 and rounded once: W + 4 B A
    key = "model.layers.0.self_attn.q_proj"
    trained = adapters(agent)
    stem = f"base_model.model.{key}.lora_"
    product = trained[f"{stem}B.default.weight"] @ trained[f"{stem}A.default.weight"]
    start = load(folder / "pair", precision="bfloat16").model.state_dict()[f"{key}.weight"]
    assert torch.equal(saved[f"{key}.weight"], (start.float() + 4.0 * product).to(torch.bfloat16))


def test_sampler_and_learner_agree_with_adapters(folder: Path) -> None:
    agent = adapted(folder / "char")
    train(learner_of(agent))
    rollouts = sample_rollouts(
        TransformersEngine(agent), [problem("1+1:"), problem("3:")], 3, Sampling(8), seed=0
    )
    for rollout in rollouts:
        with torch.no_grad():
            ids = agent.encode_prompt(rollout.problem)
            expected = plain_logprobs(agent.model, ids, rollout.token_ids, Sampling(8))
        torch.testing.assert_close(torch.tensor(rollout.token_logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("targets", "unknown"), [("qproj", "qproj"), (("q_proj", "kproj", "vproj"), "kproj, vproj")]
)
def test_unknown_layers_are_named_with_those_there_are(
    folder: Path, targets: str | tuple[str, ...], unknown: str
) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder / "char", LoraSettings(targets=targets))
    assert str(caught.value).startswith(f"agents.ada.lora.targets: the model has no layer called {unknown};")
    assert "it has down_proj, gate_proj, k_proj" in str(caught.value)


def test_layers_that_cannot_have_an_adapter(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"agents\.ada\.lora\.targets=\('norm',\): .*not supported"):
        load(folder / "char", LoraSettings(targets=("norm",)))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_tied_embeddings_cannot_be_adapted_alone(folder: Path, target: str) -> None:
    """Merging would change the other end too. Untied ones can."""
    with torch.random.fork_rng():
        config = load(folder / "pair").model.config
        config.tie_word_embeddings = True
        Agent("tied", LlamaForCausalLM(config), pair_tokenizer()).save(folder / "tied")
    with pytest.raises(ModelError, match=rf"agents\.ada\.lora\.targets: {target} shares its weights"):
        load(folder / "tied", LoraSettings(targets=target))
    agent = load(folder / "pair", LoraSettings(rank=2, alpha=8.0, targets=target))
    train(learner_of(agent))
    agent.save(folder / "out")
    merged = AutoModelForCausalLM.from_pretrained(folder / "out")
    torch.testing.assert_close(logprobs(merged), logprobs(agent.model), atol=1e-5, rtol=0)


def test_tied_models_are_saved_tied(folder: Path) -> None:
    config = load(folder / "pair").model.config
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    sharpened(Agent("tied", LlamaForCausalLM(config), pair_tokenizer()), 5.0).save(folder / "tied")
    agent = adapted(folder / "tied")
    train(learner_of(agent))
    agent.save(folder / "out")
    assert "lm_head.weight" not in load_file(folder / "out" / "model.safetensors")
    merged = AutoModelForCausalLM.from_pretrained(folder / "out")
    torch.testing.assert_close(logprobs(merged), logprobs(agent.model), atol=1e-5, rtol=0)


def test_without_peft_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"agents\.ada\.lora needs peft: pip install 'hacrl\[lora\]'"):
        adapted(folder / "char")
    assert load(folder / "char").name == "ada"  # and nobody else needs it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be between 1 and 65536, not 0"),
        ({"rank": 2**63}, "rank must be between 1 and 65536, not 9223372036854775808"),
        ({"alpha": 0.0}, "alpha must be positive, not 0.0"),
        ({"alpha": -1.0}, "alpha must be positive, not -1.0"),
        ({"targets": ()}, "targets must name layers"),
        ({"targets": ""}, "targets must name layers"),
    ],
)
def test_impossible_settings(options: dict[str, int | float | str | Sequence[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**options)
