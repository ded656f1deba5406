"""Resolving and loading models, and every way in which that fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hacrl.config.schema import AgentSettings
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.models.model_sources import bundled_agents, resolve_model
from tests.support.tiny import char_agent, pair_agent, save_agents


def load(reference: str | Path, **options) -> Agent:
    return Agent.load(AgentSettings(name="ada", model=str(reference), **options), "cpu")


def test_a_folder_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_agents(tmp_path)["char"]
    assert resolve_model(folder) == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/char") == folder


def test_a_hugging_face_id_is_not_changed() -> None:
    assert resolve_model("Qwen/Qwen3-1.7B-Base") == "Qwen/Qwen3-1.7B-Base"
    assert resolve_model("gpt2") == "gpt2"


@pytest.mark.parametrize("reference", ["./nowhere", "/no/where", "~/nowhere-at-all", "runs/demo/agents/ada"])
def test_missing_folder(reference: str) -> None:
    with pytest.raises(ModelError, match=f"folder {reference} does not exist"):
        resolve_model(reference)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_or_an_empty_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("steps: 1")
    with pytest.raises(ModelError, match=r"recipe\.yaml is a file; give the folder"):
        resolve_model(str(tmp_path / "recipe.yaml"))
    for reference in ("", " "):
        with pytest.raises(ModelError, match="names nothing; give a folder"):
            resolve_model(reference)


def test_unknown_bundled_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ModelError, match="no bundled agent 'nobody'; there are .*" + next(iter(bundled_agents()))
    ):
        resolve_model("bundled:nobody")


def test_bundled_name_is_its_folder() -> None:
    for name, folder in bundled_agents().items():
        assert resolve_model(f"bundled:{name}") == str(folder)
        assert (folder / "config.json").is_file()


def test_load_gives_the_saved_weights_in_evaluation_mode(tmp_path: Path) -> None:
    saved = char_agent(seed=5)
    saved.save(tmp_path / "char")
    agent = load(tmp_path / "char")
    assert agent.name == "ada"
    assert not agent.model.training
    assert agent.policy_version == 0
    for name, weights in saved.model.state_dict().items():
        assert torch.equal(agent.model.state_dict()[name], weights)


def test_half_precision_folders_are_trained_in_float32(tmp_path: Path) -> None:
    agent = char_agent()
    agent.model.half()
    agent.save(tmp_path / "char")
    assert {p.dtype for p in load(tmp_path / "char").model.parameters()} == {torch.float32}


def test_chat_template_can_be_switched_off(tmp_path: Path) -> None:
    agent = char_agent()
    agent.tokenizer.chat_template = "({{ messages[0].content }})"
    agent.save(tmp_path / "char")
    assert load(tmp_path / "char").use_chat_template
    assert not load(tmp_path / "char", chat_template=False).use_chat_template


def test_model_that_cannot_be_found_names_the_agent() -> None:
    words = "agents.ada.model: 'nobody-has-this' is not in the local cache, and the Hugging Face hub cannot"
    with pytest.raises(ModelError, match=re.escape(words)):
        load("nobody-has-this")


def test_broken_config_names_the_agent(tmp_path: Path) -> None:
    char_agent().save(tmp_path / "char")
    (tmp_path / "char" / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="agent 'ada': cannot load config"):
        load(tmp_path / "char")


def test_tokenizer_without_a_stop_token(tmp_path: Path) -> None:
    char_agent().save(tmp_path / "char")
    config = tmp_path / "char" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    del settings["eos_token"]
    config.write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"agent 'ada': the tokenizer of .* has no eos_token"):
        load(tmp_path / "char")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers and warn."""
    from safetensors.torch import load_file, save_file

    char_agent().save(tmp_path / "char")
    weights = load_file(tmp_path / "char" / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if "layers.1." not in name}
    save_file(kept, tmp_path / "char" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"do not fit its config\.json: \d+ missing keys, e\.g\. model\.layers\.1"
    ):
        load(tmp_path / "char")


def test_a_tokenizer_larger_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    char_agent().save(tmp_path / "mixed")
    pair_agent().tokenizer.save_pretrained(tmp_path / "mixed")  # 122 tokens, the model has 22
    with pytest.raises(ModelError, match="has token 121, the model only 22 embeddings"):
        load(tmp_path / "mixed")


def only_pickled(folder: Path) -> dict[str, torch.Tensor]:
    """Replace a model's weights by the older pickle format; return the weights."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return weights


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    char_agent().save(tmp_path / "char")
    weights = only_pickled(tmp_path / "char")
    with pytest.raises(
        ModelError, match=r"agents\.ada\.model: .* no weights as model\.safetensors"
    ) as caught:
        load(tmp_path / "char")
    command = re.search(r'python -c "(.*)", then use char-safetensors', str(caught.value))
    assert command is not None
    done = subprocess.run([sys.executable, "-c", command[1]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    converted = load(tmp_path / "char-safetensors")
    assert all(torch.equal(converted.model.state_dict()[name], one) for name, one in weights.items())
    (tmp_path / "char" / "other.safetensors").write_bytes(b"")  # transformers reports this error itself
    with pytest.raises(ModelError, match="pickles, which can run code, and are not loaded"):
        load(tmp_path / "char")


def test_a_pickle_beside_safetensors_is_ignored(tmp_path: Path) -> None:
    char_agent().save(tmp_path / "char")
    (tmp_path / "char" / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert load(tmp_path / "char").name == "ada"
