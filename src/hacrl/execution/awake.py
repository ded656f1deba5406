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

from hacrl.agents.engine_settings import MOST_MEMORY
from hacrl.agents.settings import AgentSettings
from hacrl.config.schema import RunConfig
from hacrl.execution.memory import (
    Sized,
    agents_by_device,
    available_bytes,
    choose_micro_batch_tokens,
    footprints,
    offload_plans,
    same_name,
)
from hacrl.execution.offloading import COMFORTABLE

SUM_OF_COMPUTE = 1.2  # shares of processors: 0.6 for each of two, which took 7% less time than 1 for each
LEAST_COMPUTE = 0.4  # what an engine has when others are done
ABOUT_THE_SAME = 1.5  # how many times larger the largest model is than the smallest


def settle_engines(config: RunConfig, sized: Sized) -> tuple[RunConfig, tuple[str, ...]]:
    """The run with ``memory`` and ``sleep`` of its engines decided; sentences about that for the user."""
    asked = [agent for agent in config.agents if config.engine(agent) == "vllm"]
    if not asked:
        return config, ()
    from hacrl.rollout.vllm.launch import sleeps

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
        return _sharing_processors(config, sized), ()
    note = (
        f"there is room for the vLLM engines of {', '.join(undecided)} beside learning: they stay awake. "
        "With vllm.sleep=true they would give their memory back in between"
    )
    return _sharing_processors(awake, sized), (note,)


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


def _sharing_processors(config: RunConfig, sized: Sized) -> RunConfig:
    """The run with ``compute`` decided for engines that are asked at the same time and need about as long.

    Under MPS, kernels that would each take a whole GPU wait for each other; those that cannot run side by
    side. Where one engine has more to do than the others, it would miss what they no longer need.
    """
    from hacrl.rollout.vllm.launch import sleeps

    known, by_name = footprints(config, sized), {agent.name: agent for agent in config.agents}
    changes: dict[str, dict[str, Any]] = {}
    for device, names in agents_by_device(sized).items():
        beside = [
            one
            for one in map(by_name.__getitem__, names)
            if config.engine(one) == "vllm" and one.vllm.url is None and one.vllm.devices is None
            if one.name in known and device != "cpu" and not sleeps(torch.device(device), one.vllm)
        ]
        sizes = [known[one.name].weights for one in beside]
        if len(beside) > 1 and max(sizes) <= ABOUT_THE_SAME * min(sizes):
            share = max(LEAST_COMPUTE, SUM_OF_COMPUTE / len(beside))
            changes |= {one.name: {"compute": share} for one in beside if one.vllm.compute is None}
    return _told(config, changes)


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
            if config.engine(agent) == "vllm" and place in agents_by_device(sized):
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
