"""What is sent away from a GPU: peaks worked out by hand, and who decides when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from transformers import AutoConfig

from hacrl.cli.dry_run import dry_run_lines
from hacrl.config.load import load_config
from hacrl.config.schema import OffloadLevel
from hacrl.memory import plan as memory
from hacrl.memory.decision import decide_memory
from hacrl.memory.plan import (
    OffloadPlan,
    Sized,
    device_memory,
    footprints,
    host_bytes,
    offload_note,
    peak_with,
    plan_offload,
    streamed_bytes,
)
from hacrl.models.agent import Agent
from hacrl.models.footprint import Footprint, ParameterCounts, Workload
from hacrl.runs.dry_run import dry_run
from tests.models.footprints import QWEN3_1_7B, footprint_of
from tests.runs.test_dry_run import shapes
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, pair_agent

GIB = 2**30
COUNTS = ParameterCounts(base=1, adapters=0, trainable=1, largest=1)


def footprint(agent: str, **parts: int) -> Footprint:
    return Footprint(agent=agent, counts=COUNTS, precision="bfloat16", **parts)


ADA = footprint(
    "ada",
    weights=2,
    masters=4,
    gradients=4,
    moments=8,
    reference=1,
    cache=10,
    decoding=1,
    activations=3,
    logits=2,
    backward=1,
    update=0,
)
BOB = footprint(
    "bob",
    weights=4,
    masters=8,
    gradients=8,
    moments=16,
    reference=2,
    cache=20,
    decoding=2,
    activations=5,
    logits=1,
    backward=2,
    update=9,
    engine=3,
)
BOTH = [ADA, BOB]


def test_peaks_and_what_is_sent_by_hand() -> None:
    # held always: 19 and 41; then the larger of 11 (rollout) and 22
    assert peak_with("never", BOTH) == 19 + 41 + 22
    # references and an engine stay: 6. All weights: 6. Ada generates with 11 or learns with 16 + 3 + 2, Bob
    # generates with 22 or learns with 32 + the larger of 5 + 2 and 9
    assert peak_with("optimizer", BOTH) == 6 + 6 + 41
    # learning: ada's gradients 4 and the larger of 3 + 2 and all she moves, 12 (less than a piece); Bob's 8
    # and the larger of 5 + 2 and 9 + 24
    assert peak_with("stream", BOTH) == 6 + 6 + 41
    # Bob's weights alone, 4
    assert peak_with("weights", BOTH) == 6 + 4 + 41
    assert peak_with("weights", [ADA]) == 1 + 2 + 16
    assert peak_with("all", BOTH) == 6 + 4 + 41  # sums of gradients are too few to be on their way
    assert [host_bytes(level, BOTH) for level in get_args(OffloadLevel)] == [
        *(0, 12 + 24, 12 + 24),
        12 + 24 + 6,
        12 + 24 + 6 + 12,
    ]


def test_weights_and_the_first_masters_meet_at_the_start() -> None:
    """Three agents with 10 bytes of weights, 20 of masters (less than a piece) and nothing else of note."""
    empty = dict.fromkeys(("gradients", "moments", "reference", "cache", "decoding"), 0)
    empty |= dict.fromkeys(("activations", "logits", "backward", "update"), 0)
    three = [footprint(name, weights=10, masters=20, **empty) for name in ("ada", "bob", "cyd")]
    # with masters, then: Bob's weights and Cyd's are there, but Ada's have left
    assert peak_with("weights", three) == 30 + 20
    assert peak_with("stream", three) == 30 + 20
    large = replace(three[2], masters=35)
    assert peak_with("weights", [*three[:2], large]) == max(30 + 20, 20 + 20, 10 + 35)
    assert peak_with("stream", [*three[:2], large]) == 30 + 35


def test_two_pieces_of_a_large_agent_are_on_the_device_at_a_time() -> None:
    """12 bytes each for 4e9 weights, the largest tensor with 4e8: it alone, or two pieces of 1 GiB."""
    counts = ParameterCounts(base=4 * 10**9, adapters=0, trainable=4 * 10**9, largest=4 * 10**8)
    large = replace(ADA, counts=counts, masters=16 * 10**9, moments=32 * 10**9, gradients=16 * 10**9)
    assert streamed_bytes(large) == 48 * 10**8
    assert peak_with("stream", [large]) == 1 + 2 + 16 * 10**9 + 48 * 10**8
    even = replace(large, counts=replace(counts, largest=10**7))
    assert streamed_bytes(even) == 2 * GIB
    passes = replace(even, activations=20 * GIB)  # then it is the passes that need most
    assert peak_with("stream", [passes]) == 1 + 2 + 16 * 10**9 + 20 * GIB + 2
    assert peak_with("optimizer", [passes]) == 1 + 2 + (16 + 48) * 10**9 + 20 * GIB + 2


def test_sums_of_gradients_that_travel_leave_room() -> None:
    """4e9 weights again, 16e9 bytes of gradients. What is on the way has 3/4 GiB at most."""
    counts = ParameterCounts(base=4 * 10**9, adapters=0, trainable=4 * 10**9, largest=4 * 10**8)
    large = replace(ADA, counts=counts, masters=16 * 10**9, moments=32 * 10**9, gradients=16 * 10**9)
    # the update: the largest tensor's master, moments and sum
    assert peak_with("all", [large]) == 1 + 2 + 64 * 10**8
    even = replace(large, counts=replace(counts, largest=10**7), activations=20 * GIB)
    assert peak_with("all", [even]) == 1 + 2 + 20 * GIB + 2 + 3 * GIB // 4
    # the end of a pass: the sum of the largest tensor meets its gradients
    tied = replace(large, backward=8 * 10**9)
    assert peak_with("all", [tied]) == 1 + 2 + 8 * 10**9 + 16 * 10**8 + 3 * GIB // 4
    # an output layer of its own: its sum comes first, with all activations there; and a layer's largest
    apart = replace(even, head_sum=16 * 10**8, layer_sum=3 * 10**8)
    assert peak_with("all", [apart]) == peak_with("all", [even]) + 19 * 10**8
    assert host_bytes("all", [large]) == 64 * 10**9 + 2
    # float32 weights have no masters: torch adds up their gradients where they are
    own = replace(large, masters=0)
    assert peak_with("all", [own]) == peak_with("weights", [own]) == 1 + 2 + 16 * 10**9 + 32 * 10**8
    assert host_bytes("all", [own]) == 32 * 10**9 + 2


@pytest.mark.parametrize(
    ("available", "host", "level"),
    [
        (97, 1000, "never"),  # 85% are 82.45, 82 are needed
        (96, 1000, "optimizer"),
        (63, 1000, "optimizer"),  # 53.55 and 53
        (62, 1000, "weights"),
        (10, 1000, "weights"),  # never fits; least is best, and of equal ones the first
        (62, 50, "optimizer"),  # four fifths of the machine's memory are 40, 42 would go there
        (10, 44, "never"),  # 35.2 and 36
        (10, -5, "never"),
    ],
)
def test_as_little_leaves_as_makes_it_fit(available: int, host: int, level: str) -> None:
    plan = plan_offload("auto", BOTH, "cuda:0", available, host)
    assert (plan.level, plan.needed, plan.host) == (level, peak_with(level, BOTH), host_bytes(level, BOTH))
    assert plan_offload("auto", BOTH, "cpu", available, host).level == "never"


def test_weights_of_a_lone_agent_never_leave_by_themselves() -> None:
    # it always needs them: with or without, 5 + 4 + 41
    assert plan_offload("auto", [BOB], "cuda:0", 10, 1000) == OffloadPlan("optimizer", 50, 24)


def test_what_was_asked_for_is_done_even_if_it_does_not_help() -> None:
    assert plan_offload("never", BOTH, "cuda:0", 10, 1000).level == "never"
    assert plan_offload("all", BOTH, "cuda:0", 1000, 10).level == "all"
    assert plan_offload("all", BOTH, "cpu", 10, 1000).level == "never"


def test_the_user_is_told_what_leaves_and_why() -> None:
    plan = OffloadPlan("optimizer", 84 * GIB, 64 * GIB)
    assert offload_note("cuda:0", plan, "auto", 157 * GIB, 139 * GIB) == (
        "optimizers leave cuda:0 while they are not needed, for 64.0 GiB of the machine's memory (all agents "
        "would need about 157.0 of its 139.0 GiB at once; now about 84.0 GiB). No number changes"
    )
    told = offload_note("cuda:1", OffloadPlan("weights", 1, 1), "weights", 157 * GIB, 139 * GIB)
    assert told.startswith(
        "optimizers pass through cuda:1 a piece at a time when they make updates, and weights of agents not "
        "at work leave it, for 0.0 GiB"
    )
    assert "(learning.offload=weights; " in told
    told = offload_note("cuda:1", OffloadPlan("all", 1, 1), "auto", 157 * GIB, 139 * GIB)
    assert "and weights of agents not at work and sums of gradients leave it, for 0.0 GiB" in told
    assert offload_note("cuda:0", OffloadPlan("never", 1, 0), "auto", 1, 10) is None


@pytest.mark.parametrize(
    ("checkpointing", "stream", "everything"), [(False, 35.89, 29.47), (True, 13.96, 8.09)]
)
def test_streamed_updates_beside_what_was_measured_on_a_gpu(checkpointing, stream, everything) -> None:
    """GiB on an H200: updates from 256 samples of 1,152 tokens, 16 at a time."""
    work = Workload(decodings=(), learnt_tokens=18432, longest_sample=1152)
    found = footprint_of(
        AutoConfig.for_model(**QWEN3_1_7B),
        work,
        "cuda",
        precision="bfloat16",
        gradient_checkpointing=checkpointing,
    )
    assert peak_with("stream", [found]) / GIB == pytest.approx(stream, rel=0.05)
    assert peak_with("all", [found]) / GIB == pytest.approx(everything, rel=0.05)
    assert peak_with("optimizer", [found]) - peak_with("stream", [found]) == found.masters + found.moments


def there(gpu: float, host: float):
    return lambda device: int((host if device == "cpu" else gpu) * GIB)


def test_the_paper_pair_fits_one_gpu_of_139_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", there(139, 125))
    sized = Sized({"small": "cuda", "large": "cuda:0"}, shapes(), {})

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
    assert auto.needed == peak_with("optimizer", list(known.values()))
    # on 80 GiB optimizers have to stream: then the largest of all is the 4B's cache, 64 responses' of 5,120
    # tokens with 144 KiB each, beside its weights
    monkeypatch.setattr(memory, "available_bytes", there(80, 125))
    assert on_gpu("learning.offload=optimizer").fits is False
    smaller = on_gpu()
    assert (smaller.offload, smaller.fits) == ("weights", True)
    large = known["large"]
    assert large.cache == 64 * 5120 * 144 * 1024
    assert smaller.needed == sum(f.reference for f in known.values()) + large.weights + large.rollout


def test_the_paper_pair_on_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reference, shorter responses and fewer at a time: 4 bytes a weight make the difference."""
    monkeypatch.setattr(memory, "available_bytes", there(24, 125))
    sized = Sized({"small": "cuda", "large": "cuda:0"}, shapes(), {})
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
    """Small on one takes 19.2 of its 60 GiB. Of the 40.8 left 32.6 may be used; large wants 45."""
    monkeypatch.setattr(memory, "available_bytes", there(45, 60))
    sized = Sized({"small": "cuda:0", "large": "cuda:1"}, shapes(), {})
    run = load_config(Path("paper_size"))
    first, second = device_memory(run, sized, footprints(run, sized))
    assert (first.offload, second.offload) == ("optimizer", "never")
    assert first.host == 12 * 1_720_574_976


class OnGpu(Agent):
    """Says that it is on a GPU; nothing is computed here."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def decision(monkeypatch: pytest.MonkeyPatch, gpu: int, agents: Mapping[str, Agent], *overrides: str):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**40 if device == "cpu" else gpu)
    monkeypatch.setattr("hacrl.memory.decision.available_bytes", lambda _: gpu)
    names = "[" + ", ".join(f"{{name: {name}, model: x}}" for name in agents) + "]"
    task = SevensTask()
    config = load_config(Path("demo"), [f"agents={names}", "rollout.max_new_tokens=4", *overrides])
    checked = SimpleNamespace(train=task.train, test=task.test)
    return decide_memory(config, checked, list(agents.values()))


def test_loaded_agents_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = {agent.name: agent for agent in (char_agent(), pair_agent())}
    assert decision(monkeypatch, 1, agents, "learning.offload=all").notes == ()  # on a CPU
    for agent in agents.values():
        agent.__class__ = OnGpu
    roomy = decision(monkeypatch, 2**40, agents)
    assert (roomy.levels, roomy.notes) == ({"char": "never", "pair": "never"}, ())
    tight = decision(monkeypatch, 1, agents)
    assert tight.levels == {"char": "weights", "pair": "weights"}
    [note] = tight.notes
    assert "and weights of agents not at work leave it" in note
    asked = decision(monkeypatch, 2**40, agents, "learning.offload=optimizer")
    assert asked.levels == {"char": "optimizer", "pair": "optimizer"}


def test_micro_batches_keep_a_gpu_busy_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
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
    sized = Sized({"small": "cuda", "large": "cuda:0"}, shapes(), {"small": 100, "large": 100})
    monkeypatch.setattr(memory, "available_bytes", lambda _: 300 * GIB)
    # 1.72e9 x 16384 and 4.02e9 x 8192 are the first above 2e13
    assert memory.choose_micro_batch_tokens(run, sized) == {"small": 16384, "large": 8192}
    spacious = replace(run.agents[0], gradient_checkpointing=False)  # learning is what takes most
    alone = replace(run, agents=(spacious,), learning=replace(run.learning, offload="never"))
    sized = Sized({"small": "cuda"}, shapes(), {"small": 100})
    [few, some, many] = [
        footprints(alone, sized, {"small": tokens})["small"].peak for tokens in (4096, 8192, 16384)
    ]
    assert few < some < many
    for comfortable, tokens in ((few, 4096), (some - 1, 4096), (some, 8192), (many - 1, 8192), (many, 16384)):
        monkeypatch.setattr(memory, "available_bytes", lambda _, most=comfortable: most / 0.85 + 0.5)
        assert memory.choose_micro_batch_tokens(alone, sized) == {"small": tokens}


def test_an_agent_whose_logits_exist_all_at_once_learns_from_fewer_tokens(
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


def test_of_unusual_agents_nothing_leaves_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = char_agent()
    agent.__class__ = OnGpu
    agent.model.config = AutoConfig.for_model("mamba", vocab_size=22, hidden_size=16, num_hidden_layers=1)
    auto = decision(monkeypatch, 1, {"char": agent})
    assert auto.levels == {"char": "never"}
    assert "counts as never on cuda:0: an agent's layers are unusual" in auto.notes[0]
    assert decision(monkeypatch, 1, {"char": agent}, "learning.offload=all").levels == {"char": "all"}


def test_a_dry_run_says_what_leaves(tmp_path: Path) -> None:
    config = load_config(Path("demo"), ["device=cpu", f"output={tmp_path}/run"])
    plan = dry_run(config)
    assert not any("leave it" in line for line in dry_run_lines(plan))
    (cpu,) = plan.devices
    moved = memory.DeviceMemory("cuda:0", cpu.agents, GIB, 2 * GIB, offload="weights", host=3 * GIB)
    lines = list(dry_run_lines(replace(plan, devices=(moved,))))
    place = next(i for i, line in enumerate(lines) if line.startswith("cuda:0 ("))
    assert lines[place + 1] == (
        "  optimizers pass through it a piece at a time when they make updates, and weights of agents not at "
        "work leave it: 3.0 GiB of the machine's memory"
    )
