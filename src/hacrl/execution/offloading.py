"""What agents on a GPU send to the machine's memory while they do not need it, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hacrl.agents.footprint import FLOAT32, Footprint, peak_together
from hacrl.learning.gradient_sums import COMING, LEAVING
from hacrl.learning.optimizer import STREAMED_AT_ONCE
from hacrl.learning.optimizer_piece import PIECE
from hacrl.learning.settings import WEIGHTS_LEAVE, Offload, OffloadLevel

GIB = 2**30
COMFORTABLE = 0.85  # share of a device that an estimate may fill: the CUDA context and waste come on top
HOST_SHARE = 0.8  # of the machine's memory, at most, for what was sent there


@dataclass(frozen=True)
class OffloadPlan:
    """One device: what leaves it, and the bytes needed there and in the machine's memory."""

    level: OffloadLevel
    needed: int
    host: int


def plan_offload(
    asked: Offload, footprints: Sequence[Footprint], device: str, available: int, host_available: int
) -> OffloadPlan:
    """What was asked for; "auto": the first level with which the device is comfortably large enough.

    If it never is, the level that needs least. Nothing ever leaves a CPU.
    """
    if device == "cpu" or not footprints:
        return _plan("never", footprints)
    if asked != "auto":
        return _plan(asked, footprints)
    plans = [_plan(level, footprints) for level in get_args(OffloadLevel)]
    possible = [plan for plan in plans if plan.host <= max(0.0, HOST_SHARE * host_available)]
    fitting = [plan for plan in possible if plan.needed <= COMFORTABLE * available]
    return fitting[0] if fitting else min(possible, key=lambda plan: plan.needed)  # the first of equal ones


def _plan(level: OffloadLevel, footprints: Sequence[Footprint]) -> OffloadPlan:
    return OffloadPlan(level, peak_with(level, footprints), host_bytes(level, footprints))


def host_bytes(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """What is sent away of all agents together; unless they are, gradients are let go instead."""
    sent = sum(one.masters + one.moments for one in footprints) if level != "never" else 0
    sent += sum(one.weights for one in footprints) if level in WEIGHTS_LEAVE else 0
    return sent + (sum(map(_sums, footprints)) if level == "all" else 0)


def peak_with(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """Most bytes on a device that the agents share."""
    if level == "never":
        return peak_together(footprints)
    weights = sum(one.weights for one in footprints)
    others = {one.agent: 0 if level in WEIGHTS_LEAVE else weights - one.weights for one in footprints}
    turns = [one.weights + others[one.agent] + _turn(one, level) for one in footprints]
    stays = sum(one.reference + one.engine for one in footprints)
    return stays + max([_start(level, footprints), *turns], default=0)


def _start(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """All weights meet when they are loaded; then masters are made, and leave, one agent after the other."""
    weights = [one.weights for one in footprints]
    leave = level in WEIGHTS_LEAVE
    there = [sum(weights[number:]) if leave else sum(weights) for number in range(len(weights))]
    made = [min(one.masters, streamed_bytes(one)) for one in footprints]  # earlier ones have left
    return max(map(sum, zip(there, made, strict=True)), default=0)


def _turn(one: Footprint, level: OffloadLevel) -> int:
    """Besides weights: generating needs no optimizer, learning no cache."""
    if level == "optimizer":
        learning = one.masters + one.moments + max(one.learning, one.update)
    else:  # passes need gradients alone, and what streams comes after them
        learning = max(one.learning, one.update + streamed_bytes(one))
    if level != "all" or not _sums(one):
        return max(one.rollout, one.gradients + learning)
    # sums of a few tensors are on their way; the largest, that of embeddings, comes at the end of a pass
    under_way = COMING + LEAVING + one.layer_sum
    passes = max(one.learning + one.head_sum, one.backward + FLOAT32 * one.counts.largest) + under_way
    update = streamed_bytes(one) * (one.masters + one.moments + one.gradients) // (one.masters + one.moments)
    return max(one.rollout, min(one.gradients + learning, max(passes, one.update + update)))


def _sums(one: Footprint) -> int:
    """Bytes of gradients that can leave: those of float32 weights are where torch adds them up."""
    return one.gradients if one.masters else 0


def streamed_bytes(one: Footprint) -> int:
    """Of masters and moments that are on a device at a time while an update streams them through it."""
    moved = one.masters + one.moments
    single = moved * one.counts.largest // max(1, one.counts.trainable)  # a tensor is never split
    return min(moved, max(STREAMED_AT_ONCE * PIECE, single))


def what_leaves(level: OffloadLevel, device: str) -> str:
    """A clause for the user; empty if nothing does."""
    streams = f"optimizers pass through {device} a piece at a time when they make updates"
    return {
        "never": "",
        "optimizer": f"optimizers leave {device} while they are not needed",
        "stream": streams,
        "weights": f"{streams}, and weights of agents not at work leave it",
        "all": f"{streams}, and weights of agents not at work and sums of gradients leave it",
    }[level]


def offload_note(device: str, plan: OffloadPlan, asked: Offload, before: int, available: int) -> str | None:
    """What the user should know about it; None: nothing leaves."""
    if plan.level == "never":
        return None
    why = (
        f"all agents would need about {before / GIB:.1f} of its {available / GIB:.1f} GiB at once"
        if asked == "auto"
        else f"learning.offload={asked}"
    )
    return (
        f"{what_leaves(plan.level, device)}, for {plan.host / GIB:.1f} GiB of the machine's memory ({why}; "
        f"now about {plan.needed / GIB:.1f} GiB). No number changes"
    )
