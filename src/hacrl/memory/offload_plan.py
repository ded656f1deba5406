"""Choose what agents on a GPU offload to the machine's memory, from estimates of what each level saves.

The levels, from least to most: nothing; ``optimizer`` (masters and moments while the agent does not learn);
``stream`` (masters and moments except in updates, which stream them through the GPU); ``weights`` (also the
weights of agents that are not at work); ``all`` (also gradient sums between backward passes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hacrl.config.schema import WEIGHTS_LEAVE, Offload, OffloadLevel
from hacrl.models.footprint import FLOAT32, Footprint, peak_together
from hacrl.training.gradients import MAX_HELD_BYTES, PREFETCH_BYTES
from hacrl.training.optimizer import STREAMED_BLOCKS
from hacrl.training.optimizer_block import BLOCK_BYTES

GIB = 2**30
COMFORTABLE = 0.85  # share of a device that an estimate may fill: CUDA context and fragmentation come on top
HOST_SHARE = 0.8  # the largest share of the machine's memory for offloaded tensors


@dataclass(frozen=True)
class OffloadPlan:
    """One device: what is offloaded, and the bytes needed there and in the machine's memory."""

    level: OffloadLevel
    needed: int
    host: int


def plan_offload(
    setting: Offload, footprints: Sequence[Footprint], device: str, available: int, host_available: int
) -> OffloadPlan:
    """Return the plan for the level that is set, or for "auto" the first level that comfortably fits.

    If no level fits, "auto" chooses the one that needs least. Agents on a CPU never offload.
    """
    if device == "cpu" or not footprints:
        return _plan("never", footprints)
    if setting != "auto":
        return _plan(setting, footprints)
    plans = [_plan(level, footprints) for level in get_args(OffloadLevel)]
    possible = [plan for plan in plans if plan.host <= max(0.0, HOST_SHARE * host_available)]
    fitting = [plan for plan in possible if plan.needed <= COMFORTABLE * available]
    return fitting[0] if fitting else min(possible, key=lambda plan: plan.needed)  # the first of equal ones


def _plan(level: OffloadLevel, footprints: Sequence[Footprint]) -> OffloadPlan:
    return OffloadPlan(level, peak_bytes(level, footprints), host_bytes(level, footprints))


def host_bytes(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """Return the bytes of the machine's memory that all agents together need at this level.

    Gradients count only at level "all": at other levels they are freed, not offloaded.
    """
    offloaded = sum(agent.masters + agent.moments for agent in footprints) if level != "never" else 0
    offloaded += sum(agent.weights for agent in footprints) if level in WEIGHTS_LEAVE else 0
    return offloaded + (sum(map(_gradient_sums, footprints)) if level == "all" else 0)


def peak_bytes(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """Return the most bytes that these agents, on one device, need there at a time."""
    if level == "never":
        return peak_together(footprints)
    weights = sum(agent.weights for agent in footprints)
    others = {agent.agent: 0 if level in WEIGHTS_LEAVE else weights - agent.weights for agent in footprints}
    turns = [agent.weights + others[agent.agent] + _phase_bytes(agent, level) for agent in footprints]
    always = sum(agent.reference + agent.engine for agent in footprints)
    return always + max([_loading_bytes(level, footprints), *turns], default=0)


def _loading_bytes(level: OffloadLevel, footprints: Sequence[Footprint]) -> int:
    """Return the peak while agents are loaded.

    All weights are loaded first. Then masters are made, and offloaded, one agent after the other.
    """
    weights = [agent.weights for agent in footprints]
    is_offloaded = level in WEIGHTS_LEAVE
    on_device = [sum(weights[number:]) if is_offloaded else sum(weights) for number in range(len(weights))]
    masters = [min(agent.masters, streamed_bytes(agent)) for agent in footprints]
    return max(map(sum, zip(on_device, masters, strict=True)), default=0)


def _phase_bytes(agent: Footprint, level: OffloadLevel) -> int:
    """Return the peak of an agent's phases besides weights: rollouts need no optimizer, learning no cache."""
    if level == "optimizer":
        learning = agent.masters + agent.moments + max(agent.learning, agent.update)
    else:  # the optimizer state streams after the backward passes
        learning = max(agent.learning, agent.update + streamed_bytes(agent))
    if level != "all" or not _gradient_sums(agent):
        return max(agent.rollout, agent.gradients + learning)
    # A few sums are prefetched or being offloaded. The largest, of the embeddings, comes at a pass's end.
    in_transfer = PREFETCH_BYTES + MAX_HELD_BYTES + agent.layer_sum
    largest_sum = FLOAT32 * agent.counts.largest
    passes = max(agent.learning + agent.head_sum, agent.backward + largest_sum) + in_transfer
    state = agent.masters + agent.moments
    update = streamed_bytes(agent) * (state + agent.gradients) // state
    return max(agent.rollout, min(agent.gradients + learning, max(passes, agent.update + update)))


def _gradient_sums(agent: Footprint) -> int:
    """Return the bytes of gradients that can be offloaded: torch keeps those of float32 weights."""
    return agent.gradients if agent.masters else 0


def streamed_bytes(agent: Footprint) -> int:
    """Return the bytes of masters and moments on a device at a time while an update streams them."""
    state = agent.masters + agent.moments
    largest = state * agent.counts.largest // max(1, agent.counts.trainable)  # a tensor is never split
    return min(state, max(STREAMED_BLOCKS * BLOCK_BYTES, largest))


def describe_offload(level: OffloadLevel, device: str) -> str:
    """Return a clause for the user that says what is offloaded; empty if nothing is."""
    streams = f"optimizer state streams through {device} during updates"
    return {
        "never": "",
        "optimizer": f"optimizer state is offloaded from {device} while it is not needed",
        "stream": streams,
        "weights": f"{streams}, and weights of agents not at work are offloaded",
        "all": f"{streams}, and weights of agents not at work and gradient sums are offloaded",
    }[level]


def offload_note(device: str, plan: OffloadPlan, setting: Offload, before: int, available: int) -> str | None:
    """Return a note for the user about the plan; None if nothing is offloaded.

    ``before``: bytes needed without offloading.
    """
    if plan.level == "never":
        return None
    why = (
        f"all agents would need about {before / GIB:.1f} of its {available / GIB:.1f} GiB at once"
        if setting == "auto"
        else f"learning.offload={setting}"
    )
    return (
        f"{describe_offload(plan.level, device)}, which takes {plan.host / GIB:.1f} GiB of the machine's "
        f"memory ({why}; now about {plan.needed / GIB:.1f} GiB). Results do not change"
    )
