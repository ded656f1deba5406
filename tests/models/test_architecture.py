"""Which models can be agents, and how: from a config alone, and by trials of loaded models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from hacrl.cli.main import app
from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError
from hacrl.models.architecture import architecture_support, check_causal, keeps_state
from hacrl.models.loading import load_model_config, load_text_codec
from hacrl.runs.dry_run import dry_run
from hacrl.runs.run import run_locally
from tests.support.architectures import save_tiny, sevens_task, tiny_config, tiny_model, two_agents
from tests.support.tiny import char_agent

RECURRENT = "recurrent or convolution layers carry a state from token to token"


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("llama", "packed", ""),
        ("gemma3", "packed", ""),  # its text part
        ("qwen3_5", "plain", RECURRENT),
        ("qwen3_next", "plain", RECURRENT),
        ("lfm2", "plain", RECURRENT),
        ("jamba", "plain", RECURRENT),
        ("mamba2", "plain", RECURRENT),
        ("falcon_h1", "plain", RECURRENT),
        ("recurrent_gemma", "plain", RECURRENT),
        ("bloom", "plain", "attention is code of the model's own"),
        ("gpt_oss", "plain", "attention scores are capped, or attention has sinks"),
        ("llama4_text", "plain", "layers are of the kind chunked_attention"),
        ("bert", "refused", "is an encoder"),
        ("t5", "refused", "is a sequence-to-sequence model"),
        ("llava", "refused", "has a type of which transformers has no causal language model"),
        ("rwkv", "refused", "divides its own weights by powers of two"),
    ],
)
def test_support_of_a_config(name: str, path: str, reason: str) -> None:
    support = architecture_support(tiny_config(name))
    assert support.path == path
    assert support.reason.startswith(reason)
    assert bool(support.reason) == (path != "packed")


def test_the_chosen_attention_counts() -> None:
    config = tiny_config("llama")
    assert architecture_support(config, "sdpa").path == "packed"
    support = architecture_support(config, "eager")
    assert (support.path, support.reason) == ("plain", "attention: eager was chosen")


def test_only_states_make_a_model_stateful() -> None:
    assert not keeps_state(tiny_config("bloom"))  # plain, but it may be padded
    assert keeps_state(tiny_config("lfm2"))  # its class does not say so, its layers do


def test_a_decoder_of_an_encoders_type_can_be_an_agent() -> None:
    config = tiny_config("bert", is_decoder=True)
    assert architecture_support(config).path == "packed"
    check_causal(transformers.BertLMHeadModel(config).eval(), "ada")


def changed_config(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def settings(folder: Path) -> AgentSettings:
    return AgentSettings(name="tiny", model=str(folder))


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("t5", {}, r"is a sequence-to-sequence model: .* \(model_type 't5'\)\. An agent is a decoder-only"),
        ("bert", {}, r"is an encoder: every token sees those after it.*\"is_decoder\": true in its config"),
        ("llava", {}, r"\(model_type 'llava'\)\. Its text part is one \(llama\): load the model with"),
        ("rwkv", {}, r"saved wrongly \(model_type 'rwkv'\)\. Set \"rescale_every\": 0 in its config\.json"),
        ("xlnet", {}, "is a permutation language model"),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "the output layer that writes tokens",
        ),
    ],
)
def test_dry_run_and_training_refuse_alike(name: str, changes: dict, words: str, tmp_path: Path) -> None:
    folder = changed_config(save_tiny(name, tmp_path / name), **changes)
    (folder / "model.safetensors").unlink()  # no weights are needed
    char_agent("partner").save(tmp_path / "partner")
    config = two_agents(settings(folder), tmp_path)
    with sevens_task():
        with pytest.raises(ModelError, match=words) as seen:
            dry_run(config)
        with pytest.raises(ModelError) as trained:
            run_locally(config)
    assert str(seen.value) == str(trained.value)
    assert str(seen.value).startswith(f"agents.tiny.model: '{folder}' ")
    assert not Path(config.output).exists()


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    tiny_model("mamba2").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"folder {tmp_path} has no tokenizer; copy tokenizer\.json"):
        load_text_codec(settings(tmp_path))


def test_a_sequence_to_sequence_model_is_named_before_its_tokenizer(tmp_path: Path) -> None:
    tiny_model("t5").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a sequence-to-sequence model"):
        load_text_codec(settings(tmp_path))


def test_a_model_with_its_own_code_names_the_key(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    changed_config(folder, model_type="own", auto_map=own)
    (folder / "configuration_own.py").write_text("raise SystemExit('this code must not run')")
    words = r"Python code of its own .*; if you trust it, set agents\.tiny\.trust_remote_code=true"
    with pytest.raises(ModelError, match=words):
        load_model_config(settings(folder))


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "jamba", "mamba2", "falcon_h1", "zamba2"])
def test_hybrids_are_causal(name: str) -> None:
    check_causal(tiny_model(name), "ada")


def test_a_model_that_sees_later_tokens_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(
        ModelError, match=r"agent 'ada': .* BertLMHeadModel depend on later tokens or on padding"
    ):
        check_causal(transformers.BertLMHeadModel(tiny_config("bert")).eval(), "ada")


def test_a_python_user_gets_the_same_refusal(tmp_path: Path) -> None:
    from hacrl import HACRLConfig, HACRLTrainer

    model = transformers.BertLMHeadModel(tiny_config("bert"))
    with pytest.raises(ModelError, match=r"agents\.bert\.model: .* is an encoder"):
        HACRLTrainer(
            agents=[{"name": "bert", "model": model, "tokenizer": char_agent().tokenizer}],
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            train_dataset=[{"prompt": f"{i}+1:"} for i in range(4)],
            args=HACRLConfig(
                output=str(tmp_path / "run"),
                steps=1,
                device="cpu",
                rollout={"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
            ),
        ).train()


@pytest.mark.parametrize("name", ["qwen3_5", "mamba2", "falcon_h1"])
def test_dry_run_of_a_hybrid(name: str, tmp_path: Path) -> None:
    char_agent("partner").save(tmp_path / "partner")
    with sevens_task():
        plan = dry_run(two_agents(settings(save_tiny(name, tmp_path / name)), tmp_path))
    tiny, partner = plan.agents
    assert (tiny.path, partner.path) == ("plain", "packed")
    assert plan.not_checked == ()
    assert tiny.footprint is not None
    # 4 bytes for each of: weights, gradients, two moments
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert tiny.footprint.persistent == 16 * sum(p.numel() for p in model.parameters())
    assert tiny.footprint.cache > 0
    assert tiny.footprint.activations > 0
    (note,) = [note for note in plan.notes if "trains plainly" in note]
    assert note.startswith("agent 'tiny' trains plainly, without packed sequences and shared prompts")
    assert RECURRENT in note
    parts = [note for note in plan.notes if "only the text part" in note]
    assert len(parts) == (name == "qwen3_5")  # which comes with an image encoder


def test_the_command_prints_the_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny("lfm2", tmp_path / "lfm2")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"agents: [{{name: lfm, model: {folder}}}, {{name: char, model: 'bundled:qwen-small-a'}}]\n"
        f"task: arithmetic\noutput: {tmp_path / 'run'}\n"
        "rollout: {prompts_per_step: 2, rollouts_per_prompt: 2, max_new_tokens: 8}\n"
    )
    with pytest.raises(SystemExit) as ended:
        app(["train", str(recipe), "--dry-run", "device=cpu"])
    output = capsys.readouterr().out
    assert ended.value.code == 0
    assert any(line.split() == ["sequences", "plain", "packed"] for line in output.splitlines())


def test_logits_to_keep_is_optional() -> None:
    """A model's own code may compute all logits, whatever it is asked for."""
    from hacrl.models.logprobs import padded_logprobs
    from hacrl.types import Sampling

    model = tiny_model("gpt_neo")
    pairs = [((4, 5, 6), (7, 8)), ((4, 5), (6, 7, 8, 9))]
    expected = padded_logprobs(model, pairs, Sampling(8), torch.device("cpu"))
    forward = model.forward
    model.forward = lambda input_ids, use_cache: forward(input_ids=input_ids, use_cache=use_cache)
    found = padded_logprobs(model, pairs, Sampling(8), torch.device("cpu"))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
