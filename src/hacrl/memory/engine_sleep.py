"""Which vLLM engines stay awake while agents learn, and what share of a GPU each takes.

An engine that sleeps leaves its memory to whoever learns. One that stays awake need not be woken, and answers
beside the others. What the user has said about any of this is left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hacrl.config.schema import MOST_MEMORY, AgentSettings, RunConfig
from hacrl.engines.registry import kind_of
from hacrl.memory.plan import (
    COMFORTABLE,
    Sized,
    agents_by_device,
    available_bytes,
    choose_micro_batch_tokens,
    footprints,
    offload_plans,
    same_name,
)


def settle_engines(config: RunConfig, sized: Sized) -> tuple[RunConfig, tuple[str, ...]]:
    """The run with ``memory`` and ``sleep`` of its engines decided; sentences about that for the user."""
    asked = [agent for agent in config.agents if kind_of(config, agent).takes_gpu_share]
    if not asked:
        return config, ()
    from hacrl.engines.vllm.launch import sleeps

    shares = _shares(config, sized, asked)
    config = _told(config, {name: {"memory": share} for name, share in shares.items()})
    undecided = [
        agent.name
        for agent in asked
        if agent.vllm.url is None and agent.vllm.sleep is None
        if sleeps(torch.device(sized.devices[agent.name]), agent.vllm)
    ]
    awake = _told(config, {name: {"sleep": False} for name in undecided})
    if not undecided or not _learns_as_well(awake, config, sized, undecided):
        return config, ()
    note = (
        f"there is room for the vLLM engines of {', '.join(undecided)} beside learning: they stay awake. "
        "With vllm.sleep=true they would give their memory back in between"
    )
    return awake, (note,)


def _shares(config: RunConfig, sized: Sized, asked: Iterable[AgentSettings]) -> dict[str, float]:
    """Of a GPU, for the engines of which nobody has said it: what the responses of a step need."""
    known = footprints(config, sized)
    shares = {}
    for agent in asked:
        if agent.vllm.memory is not None:
            continue
        found, device = known.get(agent.name), sized.devices[agent.name]
        taken = found.taken_by_engine if found is not None and device != "cpu" else 0
        share = math.ceil(1000 * taken / available_bytes(device)) / 1000
        # none is known on a device of its own; a cache of a fixed size may be larger, but needs no share
        shares[agent.name] = min(share or MOST_MEMORY, MOST_MEMORY)
    return shares


def _learns_as_well(awake: RunConfig, asleep: RunConfig, sized: Sized, names: Iterable[str]) -> bool:
    """Whether nothing more has to leave a GPU, and as many tokens are learnt from at a time."""
    tokens = choose_micro_batch_tokens(awake, sized)
    if tokens != choose_micro_batch_tokens(asleep, sized):
        return False
    plans, before = (offload_plans(run, sized, footprints(run, sized, tokens)) for run in (awake, asleep))
    guests = _guests(awake, sized)
    homes = agents_by_device(sized).items()
    devices = [device for device, agents in homes if device in guests or set(names) & set(agents)]
    return all(
        device in plans
        and plans[device].level == before[device].level
        and plans[device].needed + guests.get(device, 0) + others_bytes(device)
        <= COMFORTABLE * available_bytes(device)
        for device in devices
    )


def _guests(config: RunConfig, sized: Sized) -> dict[str, int]:
    """Device with learners -> bytes of engines there whose agents live elsewhere."""
    found: dict[str, int] = {}
    for agent in config.agents:
        home = same_name(sized.devices[agent.name])
        for place in {f"cuda:{number}" for number in agent.vllm.devices or ()} - {home}:
            if kind_of(config, agent).takes_gpu_share and place in agents_by_device(sized):
                taken = int((agent.vllm.memory or MOST_MEMORY) * available_bytes(place))
                found[place] = found.get(place, 0) + taken
    return found


def others_bytes(device: str) -> int:
    """Of a GPU that other processes hold now."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _told(config: RunConfig, changes: Mapping[str, dict[str, Any]]) -> RunConfig:
    """The run with other ``vllm`` settings of some agents."""
    return replace(
        config,
        agents=tuple(
            replace(agent, vllm=replace(agent.vllm, **changes.get(agent.name, {}))) for agent in config.agents
        ),
    )
