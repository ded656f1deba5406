"""Which vLLM engines stay awake while agents learn, and what share of a GPU each takes.

An engine that sleeps leaves its memory to whoever learns. One that stays awake need not be woken, and answers
beside the others. What the user has said about either is left as it is.
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
)
from hacrl.execution.offloading import COMFORTABLE


def settle_engines(config: RunConfig, sized: Sized) -> tuple[RunConfig, tuple[str, ...]]:
    """The run with ``memory`` and ``sleep`` of its engines decided; sentences about that for the user."""
    asked = [agent for agent in config.agents if config.engine(agent) == "vllm"]
    if not asked:
        return config, ()
    from hacrl.rollout.vllm.launch import sleeps

    shares = _shares(config, sized, asked)
    config = _with_vllm(config, {name: {"memory": share} for name, share in shares.items()})
    undecided = [
        agent.name
        for agent in asked
        if agent.vllm.url is None and agent.vllm.sleep is None
        if sleeps(torch.device(sized.devices[agent.name]), agent.vllm)
    ]
    awake = _with_vllm(config, {name: {"sleep": False} for name in undecided})
    if not undecided or not _learns_as_well(awake, config, sized, undecided):
        return config, ()
    note = (
        f"there is room for the vLLM engines of {', '.join(undecided)} beside learning: they stay awake and "
        "answer side by side. With vllm.sleep=true they would give their memory back"
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
        shares[agent.name] = share or MOST_MEMORY  # on a device of its own, or of a model that is not known
    return shares


def _learns_as_well(awake: RunConfig, asleep: RunConfig, sized: Sized, names: Iterable[str]) -> bool:
    """Whether nothing more has to leave a GPU, and as many tokens are learnt from at a time."""
    tokens = choose_micro_batch_tokens(awake, sized)
    if tokens != choose_micro_batch_tokens(asleep, sized):
        return False
    plans, before = (offload_plans(run, sized, footprints(run, sized, tokens)) for run in (awake, asleep))
    devices = [device for device, agents in agents_by_device(sized).items() if set(names) & set(agents)]
    return all(
        device in plans
        and plans[device].level == before[device].level
        and plans[device].needed <= COMFORTABLE * available_bytes(device)
        for device in devices
    )


def _with_vllm(config: RunConfig, changes: Mapping[str, dict[str, Any]]) -> RunConfig:
    """Other ``vllm`` settings of some agents."""
    return replace(
        config,
        agents=tuple(
            replace(agent, vllm=replace(agent.vllm, **changes.get(agent.name, {}))) for agent in config.agents
        ),
    )
