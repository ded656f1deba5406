"""Memory of whole runs: offload levels, micro-batch sizes, and what the user is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.load import load_config
from hacrl.memory import estimate as memory
from hacrl.memory.decision import decide_memory
from hacrl.memory.estimate import AgentShapes, device_memory, footprints
from hacrl.memory.offload_plan import (
    peak_bytes,
)
from hacrl.models.agent import Agent
from hacrl.runs.dry_run import dry_run
from tests.runs.test_dry_run import shapes
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, pair_agent

GIB = 2**30


def sizes(gpu: float, host: float):
    return lambda device: int((host if device == "cpu" else gpu) * GIB)


def test_the_paper_pair_fits_one_gpu_of_139_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "device_bytes", sizes(139, 125))
    sized = AgentShapes({"small": "cuda", "large": "cuda:0"}, shapes(), {})

    def on_gpu(*overrides: str) -> memory.DeviceMemory:
        run = load_config(Path("paper_size"), overrides)
        (found,) = device_memory(run, sized, footprints(run, sized))
        return found

    plain, auto = on_gpu("learning.offload=never"), on_gpu()
    assert (plain.offload, plain.host, plain.fits) == ("never", 0, False)
    assert "learning.offload=auto" in [advice.change for advice in plain.advice]
    assert {a.change: a.needed for a in plain.advice}["learning.offload=auto"] == auto.needed
    assert (auto.offload, auto.fits) == ("optimizer", True)
    # masters and moments of 1,720,574,976 + 4,022,468,096 weights
    assert auto.host == 12 * (1_720_574_976 + 4_022_468_096)
    run = load_config(Path("paper_size"))
    known = footprints(run, sized)
    assert auto.needed == peak_bytes("optimizer", list(known.values()))
    # on 80 GiB optimizers have to stream: then the largest of all is the 4B's cache, 64 responses' of 5,120
    # tokens with 144 KiB each, beside its weights
    monkeypatch.setattr(memory, "device_bytes", sizes(80, 125))
    assert on_gpu("learning.offload=optimizer").fits is False
    smaller = on_gpu()
    assert (smaller.offload, smaller.fits) == ("weights", True)
    large = known["large"]
    assert large.cache == 64 * 5120 * 144 * 1024
    assert smaller.needed == sum(f.reference for f in known.values()) + large.weights + large.rollout


def test_the_paper_pair_on_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a reference and with fewer, shorter responses: 4 bytes per weight decide."""
    monkeypatch.setattr(memory, "device_bytes", sizes(24, 125))
    sized = AgentShapes({"small": "cuda", "large": "cuda:0"}, shapes(), {})
    overrides = ["method.kl_coefficient=0", "rollout.max_batch=16", "rollout.max_new_tokens=1024"]

    def on_gpu(*more: str) -> memory.DeviceMemory:
        run = load_config(Path("paper_size"), [*overrides, *more])
        (found,) = device_memory(run, sized, footprints(run, sized))
        return found

    auto, before = on_gpu(), on_gpu("learning.offload=weights")
    assert (auto.offload, auto.fits, before.fits) == ("all", True, False)
    assert auto.needed < 0.85 * 24 * GIB
    assert auto.host == (12 + 4 + 2) * (1_720_574_976 + 4_022_468_096)
    assert before.needed - auto.needed > 2.5 * 4_022_468_096


def test_two_gpus_share_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "small" takes 19.2 of 60 GiB. Of the 40.8 left 32.6 may be used; "large" needs 45."""
    monkeypatch.setattr(memory, "device_bytes", sizes(45, 60))
    sized = AgentShapes({"small": "cuda:0", "large": "cuda:1"}, shapes(), {})
    run = load_config(Path("paper_size"))
    first, second = device_memory(run, sized, footprints(run, sized))
    assert (first.offload, second.offload) == ("optimizer", "never")
    assert first.host == 12 * 1_720_574_976


class OnGpu(Agent):
    """Pretends to be on a GPU; it computes nothing."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def decision(monkeypatch: pytest.MonkeyPatch, gpu: int, agents: Mapping[str, Agent], *overrides: str):
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2**40 if device == "cpu" else gpu)
    monkeypatch.setattr("hacrl.memory.decision.device_bytes", lambda _: gpu)
    names = "[" + ", ".join(f"{{name: {name}, model: x}}" for name in agents) + "]"
    task = SevensTask()
    config = load_config(Path("demo"), [f"agents={names}", "rollout.max_new_tokens=4", *overrides])
    checked = SimpleNamespace(train=task.train, test=task.test)
    return decide_memory(config, checked, list(agents.values()))


def test_loaded_agents_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {agent.name: agent for agent in (char_agent(), pair_agent())}
    assert decision(monkeypatch, 1, agents, "learning.offload=all").notes == ()  # on a CPU
    for agent in agents.values():
        agent.__class__ = OnGpu
    roomy = decision(monkeypatch, 2**40, agents)
    assert (roomy.levels, roomy.notes) == ({"char": "never", "pair": "never"}, ())
    tight = decision(monkeypatch, 1, agents)
    assert tight.levels == {"char": "weights", "pair": "weights"}
    [note] = tight.notes
    assert "and weights of agents not at work are offloaded" in note
    asked = decision(monkeypatch, 2**40, agents, "learning.offload=optimizer")
    assert asked.levels == {"char": "optimizer", "pair": "optimizer"}


def test_micro_batches_are_as_large_as_keeps_a_gpu_busy_and_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {agent.name: agent for agent in (char_agent(), pair_agent())}
    assert decision(monkeypatch, 2**40, agents).micro_batch_tokens == {"char": 4096, "pair": 4096}  # on a CPU
    for agent in agents.values():
        agent.__class__ = OnGpu
    assert decision(monkeypatch, 2**40, agents).micro_batch_tokens == {"char": 32768, "pair": 32768}
    assert decision(monkeypatch, 1, agents).micro_batch_tokens == {"char": 4096, "pair": 4096}
    for options in (["learning.offload=never"], ["learning.offload=all"], []):
        asked = decision(monkeypatch, 2**40, agents, "learning.micro_batch_tokens=77", *options)
        assert asked.micro_batch_tokens == {"char": 77, "pair": 77}


def test_large_models_need_fewer_tokens_to_keep_a_gpu_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_config(Path("paper_size"), ["learning.micro_batch_tokens=null", "rollout.max_new_tokens=1024"])
    sized = AgentShapes({"small": "cuda", "large": "cuda:0"}, shapes(), {"small": 100, "large": 100})
    monkeypatch.setattr(memory, "device_bytes", lambda _: 300 * GIB)
    # 1.72e9 x 16384 and 4.02e9 x 8192 are the first above 2e13
    assert memory.choose_micro_batch_tokens(run, sized) == {"small": 16384, "large": 8192}
    spacious = replace(run.agents[0], gradient_checkpointing=False)  # learning is what takes most
    alone = replace(run, agents=(spacious,), learning=replace(run.learning, offload="never"))
    sized = AgentShapes({"small": "cuda"}, shapes(), {"small": 100})
    [few, some, many] = [
        footprints(alone, sized, {"small": tokens})["small"].peak for tokens in (4096, 8192, 16384)
    ]
    assert few < some < many
    for comfortable, tokens in ((few, 4096), (some - 1, 4096), (some, 8192), (many - 1, 8192), (many, 16384)):
        monkeypatch.setattr(memory, "device_bytes", lambda _, most=comfortable: most / 0.85 + 0.5)
        assert memory.choose_micro_batch_tokens(alone, sized) == {"small": tokens}


def test_an_agent_with_whole_logits_has_smaller_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = char_agent()
    agent.__class__ = OnGpu
    # 22 tokens of vocabulary: 32768 x 22 x 4 x 4 bytes are 11.5 MB, and the rest of it some more
    assert decision(monkeypatch, 2**40, {"char": agent}).micro_batch_tokens == {"char": 32768}
    wide = replace_vocabulary(agent, 40_000)
    monkeypatch.setattr("hacrl.memory.decision.separate_head", lambda _: object())
    assert decision(monkeypatch, 10 * GIB, {"char": wide}).micro_batch_tokens == {"char": 32768}
    monkeypatch.setattr("hacrl.memory.decision.separate_head", lambda _: None)
    # 8192 x 40000 x 4 x 4 are 4.9 GiB, 16384 twice as much
    assert decision(monkeypatch, 10 * GIB, {"char": wide}).micro_batch_tokens == {"char": 8192}


def replace_vocabulary(agent: Agent, size: int) -> Agent:
    agent.model.config.vocab_size = size
    return agent


def test_unusual_agents_offload_only_if_set(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = char_agent()
    agent.__class__ = OnGpu
    agent.model.config = AutoConfig.for_model("blt")  # has no single width
    auto = decision(monkeypatch, 1, {"char": agent})
    assert auto.levels == {"char": "never"}
    assert "counts as never on cuda:0: an agent's layers are unusual" in auto.notes[0]
    assert decision(monkeypatch, 1, {"char": agent}, "learning.offload=all").levels == {"char": "all"}


def test_a_dry_run_says_what_is_offloaded(tmp_path: Path) -> None:
    config = load_config(Path("demo"), ["device=cpu", f"output={tmp_path}/run"])
    plan = dry_run(config)
    assert not any("offloaded" in line for line in dry_run_lines(plan))
    (cpu,) = plan.devices
    moved = memory.DeviceMemory("cuda:0", cpu.agents, GIB, 2 * GIB, offload="weights", host=3 * GIB)
    lines = list(dry_run_lines(replace(plan, devices=(moved,))))
    place = next(i for i, line in enumerate(lines) if line.startswith("cuda:0 ("))
    assert lines[place + 1] == (
        "  optimizer state streams through it during updates, and weights of agents not at work are "
        "offloaded: 3.0 GiB of host memory"
    )
