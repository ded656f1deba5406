"""What is sent to an engine is what would be saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.vllm.weight_transfer import exported_weights
from hacrl.models.agent import Agent
from hacrl.models.lora import add_adapters
from tests.support.engines import engine_agent
from tests.support.tiny import absolute_agent, pair_agent

AGENTS = {
    "untied": engine_agent,
    "tied": lambda: engine_agent(tied=True),
    "llama": pair_agent,
    "gpt2": absolute_agent,  # tied; holds its linear layers transposed
}


def saved(agent: Agent, folder: Path) -> dict[str, torch.Tensor]:
    agent.save(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS.keys())
def test_names_and_tensors_are_those_of_a_saved_folder(make, tmp_path: Path) -> None:
    agent = make()
    exported = dict(exported_weights(agent.model))
    expected = saved(agent, tmp_path)
    assert exported.keys() == expected.keys()
    assert all(exported[name].equal(expected[name]) for name in expected)
    assert not any(tensor.requires_grad for tensor in exported.values())


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS.keys())
def test_nothing_is_copied_on_the_way(make) -> None:
    model = make().model
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for _, tensor in exported_weights(model)} == own


def adapted(make, dtype: torch.dtype = torch.float32) -> Agent:
    agent = make()
    settings = AgentSettings(name="ada", model="-", lora=LoraSettings(rank=4, alpha=12.0))
    agent.model = add_adapters(agent.model.to(dtype), settings, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in agent.model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return agent


@pytest.mark.parametrize("make", AGENTS.values(), ids=AGENTS.keys())
def test_adapters_are_merged_as_peft_would(make, tmp_path: Path) -> None:
    agent = adapted(make)
    before = {name: weight.clone() for name, weight in agent.model.state_dict().items()}
    exported = {name: weight.clone() for name, weight in exported_weights(agent.model)}
    agent.model.merge_and_unload().save_pretrained(tmp_path)  # changes the model in place
    merged = load_file(tmp_path / "model.safetensors")
    plain = dict(make().model.named_parameters())
    assert exported.keys() == merged.keys()
    changed = [name for name in merged if not merged[name].allclose(plain[name], atol=1e-3)]
    assert len(changed) >= 8  # every linear layer of two blocks
    for name, weight in merged.items():
        torch.testing.assert_close(exported[name], weight, rtol=1e-6, atol=1e-6)
    assert sum("lora_" in name for name in before) >= 16


def test_exporting_leaves_adapters_and_weights_as_they_are() -> None:
    agent = adapted(engine_agent)
    before = {name: weight.clone() for name, weight in agent.model.state_dict().items()}
    list(exported_weights(agent.model))
    assert all(weight.equal(before[name]) for name, weight in agent.model.state_dict().items())


def test_adapters_are_merged_in_float32_also_into_bfloat16() -> None:
    """W + 3 B A is rounded once, to the nearest bfloat16, and not the adapters' share before it is added."""
    agent = adapted(engine_agent, torch.bfloat16)
    layer = agent.model.get_base_model().model.layers[0].mlp.up_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.dtype == b.dtype == torch.float32
    expected = (layer.base_layer.weight.float() + 3.0 * (b @ a)).bfloat16()
    rounded_first = layer.base_layer.weight + (3.0 * (b @ a)).bfloat16()
    exported = dict(exported_weights(agent.model))["model.layers.0.mlp.up_proj.weight"]
    assert exported.dtype == torch.bfloat16
    assert exported.equal(expected)
    assert not rounded_first.equal(expected)
