"""The estimate of an agent that is sharded over ranks: a rank holds a share of everything that lasts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.schema import AgentSettings, FsdpSettings, LoraSettings, RolloutSettings, RunConfig
from hacrl.memory import estimate
from hacrl.memory.estimate import AgentShapes, agents_by_device, device_memory, footprints, ranks_of
from hacrl.models.footprint import known_config
from hacrl.runs.dry_run import AgentPlan, DryRun

MODEL = "Qwen/Qwen3-8B"
PARAMETERS = 8_190_735_360
EMBEDDINGS = 151936 * 4096
GIB = 2**30


def run(**changes: Any) -> tuple[RunConfig, AgentShapes]:
    agent = AgentSettings(name="big", model=MODEL, device="cuda:1", **changes)
    config = RunConfig(agents=(agent,), output="unused", rollout=RolloutSettings(max_new_tokens=512))
    shapes = AgentShapes(
        {"big": "cuda:1"}, {"big": known_config(MODEL)}, {"big": 512}, ranks=ranks_of(config)
    )
    return config, shapes


@pytest.fixture(autouse=True)
def a_machine_with_large_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "device_bytes", lambda device: (2000 if device == "cpu" else 80) * GIB)


def test_a_rank_has_a_fourth_of_weights_gradients_and_moments() -> None:
    config, shapes = run(ranks=4)
    found = footprints(config, shapes, {"big": 4096})["big"]
    quarter = PARAMETERS // 4
    assert (found.weights, found.gradients, found.moments) == (4 * quarter, 4 * quarter, 8 * quarter)
    assert found.masters == 0  # the float32 shards are the master weights
    # both ends of the model, two layers, and the ends' gradients in 16 and 32 bits
    layer = (PARAMETERS - 2 * EMBEDDINGS) // 36
    assert found.gathered == 2 * (2 * EMBEDDINGS + 2 * layer) + 6 * 2 * EMBEDDINGS
    assert found.copy == 2 * PARAMETERS  # rank 0 generates with all weights
    alone, shapes = run()
    whole = footprints(alone, shapes, {"big": 4096})["big"]
    assert whole.persistent == 18 * PARAMETERS  # weights 2, masters 4, gradients 4, moments 8
    assert found.persistent == 16 * quarter
    assert found.activations == whole.activations


def test_adapters_are_sharded_over_frozen_16_bit_weights() -> None:
    config, shapes = run(ranks=2, lora=LoraSettings(rank=8, alpha=16.0))
    found = footprints(config, shapes, {"big": 4096})["big"]
    adapters = found.counts.adapters
    assert found.weights == (2 * PARAMETERS + 4 * adapters) // 2
    assert found.gradients == 4 * adapters // 2


def test_offloaded_shards_take_the_machines_memory() -> None:
    config, shapes = run(ranks=4, fsdp=FsdpSettings(cpu_offload=True))
    found = footprints(config, shapes, {"big": 4096})
    assert found["big"].persistent == 0
    assert found["big"].host == 16 * PARAMETERS  # of all ranks: weights 4, gradients 4, moments 8
    assert [memory.host for memory in device_memory(config, shapes, found)] == [16 * PARAMETERS] * 4


def test_every_rank_has_a_device_and_the_dry_run_says_so() -> None:
    config, shapes = run(ranks=2)
    assert agents_by_device(shapes) == {"cuda:1": ("big",), "cuda:2": ("big",)}
    known = footprints(config, shapes, {"big": 4096})
    devices = tuple(device_memory(config, shapes, known))
    assert [memory.device for memory in devices] == ["cuda:1", "cuda:2"]
    assert [memory.needed for memory in devices] == [known["big"].peak] * 2
    assert devices[0].offload == "never"
    (advice,) = [advice for advice in devices[0].advice if "cpu_offload" in advice.change]
    offloaded, _ = run(ranks=2, fsdp=FsdpSettings(cpu_offload=True))
    assert advice.needed == footprints(offloaded, shapes)["big"].peak
    assert advice.change == "agents.big.fsdp.cpu_offload=true"
    plan = DryRun(
        config=config,
        agents=(AgentPlan(config.agents[0], "cuda:1", known["big"], None, 512),),
        devices=devices,
        train_problems=None,
        test_problems=None,
        updates_per_step=2,
        notes=(),
        not_checked=(),
    )
    lines = list(dry_run_lines(plan))
    assert [line.split() for line in lines if line.startswith("ranks ")] == [["ranks", "2"]]
    assert "big: memory of each of its 2 ranks; generation is on rank 0 alone" in lines


def test_one_rank_is_estimated_as_ever() -> None:
    config, shapes = run()
    explicit = replace(config, agents=(replace(config.agents[0], ranks=1),))
    assert footprints(config, shapes) == footprints(explicit, shapes)
