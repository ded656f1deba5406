"""Decide which vLLM engines sleep while agents learn, and what share of a GPU each engine takes.

A sleeping engine gives its memory to learning. An engine that stays awake need not be woken, and generates
concurrently with others. Settings that the user has made are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hacrl.config.schema import MOST_MEMORY, AgentSettings, RunConfig
from hacrl.engines.registry import kind_of
from hacrl.memory.estimate import (
    AgentShapes,
    agents_by_device,
    canonical,
    choose_micro_batch_tokens,
    device_bytes,
    footprints,
    offload_plans,
)
from hacrl.memory.offload_plan import COMFORTABLE


def decide_engine_memory(config: RunConfig, shapes: AgentShapes) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the run with ``vllm.memory`` and ``vllm.sleep`` decided, and notes about it for the user."""
    agents = [agent for agent in config.agents if kind_of(config, agent).takes_gpu_share]
    if not agents:
        return config, ()
    from hacrl.engines.vllm.launch import sleeps

    shares = _shares(config, shapes, agents)
    config = _with_vllm(config, {name: {"memory": share} for name, share in shares.items()})
    undecided = [
        agent.name
        for agent in agents
        if not agent.vllm.urls and agent.vllm.sleep is None
        if any(sleeps(torch.device(shapes.devices[agent.name]), one) for one in agent.vllm.each())
    ]
    awake = _with_vllm(config, {name: {"sleep": False} for name in undecided})
    if not undecided or not _costs_no_learning(awake, config, shapes, undecided):
        return config, ()
    note = (
        f"there is room for the vLLM engines of {', '.join(undecided)} beside learning: they stay awake. "
        "With vllm.sleep=true they would give their memory back in between"
    )
    return awake, (note,)


def _shares(config: RunConfig, shapes: AgentShapes, agents: Iterable[AgentSettings]) -> dict[str, float]:
    """Return the share of a GPU that an engine needs for a step's responses, without ``vllm.memory``."""
    from hacrl.engines.vllm.launch import shares_device

    known = footprints(config, shapes)
    shares = {}
    for agent in agents:
        if agent.vllm.memory is not None:
            continue
        footprint, device = known.get(agent.name), shapes.devices[agent.name]
        here = max(1, sum(shares_device(torch.device(device), one) for one in agent.vllm.each()))
        needed = footprint.taken_by_engine // here if footprint is not None and device != "cpu" else 0
        share = math.ceil(1000 * needed / device_bytes(device)) / 1000
        # 0 if not known, as for an engine with devices of its own. A KV cache of a fixed size may need more
        # than MOST_MEMORY, but does not depend on the share.
        shares[agent.name] = min(share or MOST_MEMORY, MOST_MEMORY)
    return shares


def _costs_no_learning(
    awake: RunConfig, asleep: RunConfig, shapes: AgentShapes, names: Iterable[str]
) -> bool:
    """Return whether micro-batches and offload levels are the same with awake as with sleeping engines."""
    tokens = choose_micro_batch_tokens(awake, shapes)
    if tokens != choose_micro_batch_tokens(asleep, shapes):
        return False
    plans, before = (offload_plans(run, shapes, footprints(run, shapes, tokens)) for run in (awake, asleep))
    foreign = _foreign_engines(awake, shapes)
    by_device = agents_by_device(shapes).items()
    devices = [device for device, agents in by_device if device in foreign or set(names) & set(agents)]
    return all(
        device in plans
        and plans[device].level == before[device].level
        and plans[device].needed + foreign.get(device, 0) + other_processes_bytes(device)
        <= COMFORTABLE * device_bytes(device)
        for device in devices
    )


def _foreign_engines(config: RunConfig, shapes: AgentShapes) -> dict[str, int]:
    """Return device with learners -> bytes of engines there whose agents learn on other devices."""
    found: dict[str, int] = {}
    for agent in config.agents:
        own = canonical(shapes.devices[agent.name])
        for device in {f"cuda:{number}" for number in agent.vllm.devices or ()} - {own}:
            if kind_of(config, agent).takes_gpu_share and device in agents_by_device(shapes):
                taken = int((agent.vllm.memory or MOST_MEMORY) * device_bytes(device))
                found[device] = found.get(device, 0) + taken
    return found


def other_processes_bytes(device: str) -> int:
    """Return the bytes of a GPU's memory that other processes use now."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _with_vllm(config: RunConfig, changes: Mapping[str, dict[str, Any]]) -> RunConfig:
    """Return the run with changed ``vllm`` settings; ``changes`` are by agent name."""
    return replace(
        config,
        agents=tuple(
            replace(agent, vllm=replace(agent.vllm, **changes.get(agent.name, {}))) for agent in config.agents
        ),
    )
