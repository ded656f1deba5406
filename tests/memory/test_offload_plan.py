"""Offload levels: peaks of made-up agents, worked out by hand, and which level is chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from transformers import AutoConfig

from hacrl.config.schema import OffloadLevel
from hacrl.memory.offload_plan import (
    OffloadPlan,
    host_bytes,
    offload_note,
    peak_bytes,
    plan_offload,
    streamed_bytes,
)
from hacrl.models.footprint import Footprint, ParameterCounts, Workload
from tests.models.footprints import QWEN3_1_7B, footprint_of

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


def test_peaks_and_host_bytes_by_hand() -> None:
    # held always: 19 and 41; then the larger of 11 (rollout) and 22
    assert peak_bytes("never", BOTH) == 19 + 41 + 22
    # references and an engine stay: 6. All weights: 6. Ada generates with 11 or learns with 16 + 3 + 2, Bob
    # generates with 22 or learns with 32 + the larger of 5 + 2 and 9
    assert peak_bytes("optimizer", BOTH) == 6 + 6 + 41
    # learning: ada's gradients 4 and the larger of 3 + 2 and all she moves, 12 (less than a piece); Bob's 8
    # and the larger of 5 + 2 and 9 + 24
    assert peak_bytes("stream", BOTH) == 6 + 6 + 41
    # Bob's weights alone, 4
    assert peak_bytes("weights", BOTH) == 6 + 4 + 41
    assert peak_bytes("weights", [ADA]) == 1 + 2 + 16
    assert peak_bytes("all", BOTH) == 6 + 4 + 41  # gradient sums are too small to be offloaded
    assert [host_bytes(level, BOTH) for level in get_args(OffloadLevel)] == [
        *(0, 12 + 24, 12 + 24),
        12 + 24 + 6,
        12 + 24 + 6 + 12,
    ]


def test_all_weights_and_the_first_masters_are_on_the_device_while_loading() -> None:
    """Three agents with 10 bytes of weights, 20 of masters (less than a block) and little else."""
    empty = dict.fromkeys(("gradients", "moments", "reference", "cache", "decoding"), 0)
    empty |= dict.fromkeys(("activations", "logits", "backward", "update"), 0)
    three = [footprint(name, weights=10, masters=20, **empty) for name in ("ada", "bob", "cyd")]
    # with masters, then: Bob's weights and Cyd's are there, but Ada's have left
    assert peak_bytes("weights", three) == 30 + 20
    assert peak_bytes("stream", three) == 30 + 20
    large = replace(three[2], masters=35)
    assert peak_bytes("weights", [*three[:2], large]) == max(30 + 20, 20 + 20, 10 + 35)
    assert peak_bytes("stream", [*three[:2], large]) == 30 + 35


def test_two_blocks_of_a_large_agent_are_on_the_device_at_a_time() -> None:
    """12 bytes each for 4e9 weights, the largest tensor with 4e8: that tensor, or two blocks of 1 GiB."""
    counts = ParameterCounts(base=4 * 10**9, adapters=0, trainable=4 * 10**9, largest=4 * 10**8)
    large = replace(ADA, counts=counts, masters=16 * 10**9, moments=32 * 10**9, gradients=16 * 10**9)
    assert streamed_bytes(large) == 48 * 10**8
    assert peak_bytes("stream", [large]) == 1 + 2 + 16 * 10**9 + 48 * 10**8
    even = replace(large, counts=replace(counts, largest=10**7))
    assert streamed_bytes(even) == 2 * GIB
    passes = replace(even, activations=20 * GIB)  # then it is the passes that need most
    assert peak_bytes("stream", [passes]) == 1 + 2 + 16 * 10**9 + 20 * GIB + 2
    assert peak_bytes("optimizer", [passes]) == 1 + 2 + (16 + 48) * 10**9 + 20 * GIB + 2


def test_offloaded_gradient_sums_save_memory() -> None:
    """4e9 weights again, 16e9 bytes of gradients. Sums in transfer have 3/4 GiB at most."""
    counts = ParameterCounts(base=4 * 10**9, adapters=0, trainable=4 * 10**9, largest=4 * 10**8)
    large = replace(ADA, counts=counts, masters=16 * 10**9, moments=32 * 10**9, gradients=16 * 10**9)
    # the update: the largest tensor's master, moments and sum
    assert peak_bytes("all", [large]) == 1 + 2 + 64 * 10**8
    even = replace(large, counts=replace(counts, largest=10**7), activations=20 * GIB)
    assert peak_bytes("all", [even]) == 1 + 2 + 20 * GIB + 2 + 3 * GIB // 4
    # the end of a pass: the sum of the largest tensor meets its gradients
    tied = replace(large, backward=8 * 10**9)
    assert peak_bytes("all", [tied]) == 1 + 2 + 8 * 10**9 + 16 * 10**8 + 3 * GIB // 4
    # an output layer of its own: its sum comes first, with all activations there; and a layer's largest
    apart = replace(even, head_sum=16 * 10**8, layer_sum=3 * 10**8)
    assert peak_bytes("all", [apart]) == peak_bytes("all", [even]) + 19 * 10**8
    assert host_bytes("all", [large]) == 64 * 10**9 + 2
    # float32 weights have no masters: torch adds up their gradients where they are
    own = replace(large, masters=0)
    assert peak_bytes("all", [own]) == peak_bytes("weights", [own]) == 1 + 2 + 16 * 10**9 + 32 * 10**8
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
def test_auto_offloads_as_little_as_makes_it_fit(available: int, host: int, level: str) -> None:
    plan = plan_offload("auto", BOTH, "cuda:0", available, host)
    assert (plan.level, plan.needed, plan.host) == (level, peak_bytes(level, BOTH), host_bytes(level, BOTH))
    assert plan_offload("auto", BOTH, "cpu", available, host).level == "never"


def test_auto_never_offloads_weights_of_a_single_agent() -> None:
    # it always needs them: with or without, 5 + 4 + 41
    assert plan_offload("auto", [BOB], "cuda:0", 10, 1000) == OffloadPlan("optimizer", 50, 24)


def test_a_set_level_is_used_even_if_it_does_not_help() -> None:
    assert plan_offload("never", BOTH, "cuda:0", 10, 1000).level == "never"
    assert plan_offload("all", BOTH, "cuda:0", 1000, 10).level == "all"
    assert plan_offload("all", BOTH, "cpu", 10, 1000).level == "never"


def test_the_note_says_what_is_offloaded_and_why() -> None:
    plan = OffloadPlan("optimizer", 84 * GIB, 64 * GIB)
    assert offload_note("cuda:0", plan, "auto", 157 * GIB, 139 * GIB) == (
        "optimizer state is offloaded from cuda:0 while it is not needed, which takes 64.0 GiB of the "
        "machine's memory (all agents would need about 157.0 of its 139.0 GiB at once; now about 84.0 GiB). "
        "Results do not change"
    )
    told = offload_note("cuda:1", OffloadPlan("weights", 1, 1), "weights", 157 * GIB, 139 * GIB)
    assert told.startswith(
        "optimizer state streams through cuda:1 during updates, and weights of agents not at work are "
        "offloaded, which takes 0.0 GiB"
    )
    assert "(learning.offload=weights; " in told
    told = offload_note("cuda:1", OffloadPlan("all", 1, 1), "auto", 157 * GIB, 139 * GIB)
    assert "and weights of agents not at work and gradient sums are offloaded, which takes 0.0 GiB" in told
    assert offload_note("cuda:0", OffloadPlan("never", 1, 0), "auto", 1, 10) is None


@pytest.mark.parametrize(
    ("checkpointing", "stream", "everything"), [(False, 35.89, 29.47), (True, 13.96, 8.09)]
)
def test_peaks_of_streamed_updates_are_near_those_measured_on_a_gpu(
    checkpointing, stream, everything
) -> None:
    """GiB on an H200: updates from 256 samples of 1,152 tokens, 16 at a time."""
    work = Workload(decodings=(), learnt_tokens=18432, longest_sample=1152)
    found = footprint_of(
        AutoConfig.for_model(**QWEN3_1_7B),
        work,
        "cuda",
        precision="bfloat16",
        gradient_checkpointing=checkpointing,
    )
    assert peak_bytes("stream", [found]) / GIB == pytest.approx(stream, rel=0.05)
    assert peak_bytes("all", [found]) / GIB == pytest.approx(everything, rel=0.05)
    assert peak_bytes("optimizer", [found]) - peak_bytes("stream", [found]) == found.masters + found.moments
