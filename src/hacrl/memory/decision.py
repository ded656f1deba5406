"""Decide once, before optimizers are made, how loaded agents share the memory of their devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.config.schema import FEW_TOKENS, OffloadLevel, RunConfig
from hacrl.memory.engine_sleep import decide_engine_memory
from hacrl.memory.estimate import (
    AgentShapes,
    agents_by_device,
    choose_micro_batch_tokens,
    device_bytes,
    footprints,
    offload_plans,
    ranks_of,
)
from hacrl.memory.offload_plan import offload_note, peak_bytes
from hacrl.models.agent import Agent
from hacrl.models.footprint import ParameterCounts
from hacrl.models.lm_head import separate_head
from hacrl.models.lora import is_adapted
from hacrl.tasks.base import CheckedTask


@dataclass(frozen=True)
class MemoryDecision:
    """Offload levels and micro-batch sizes by agent, and notes for the user."""

    levels: dict[str, OffloadLevel]  # what is offloaded while it is not needed
    micro_batch_tokens: dict[str, int]  # most tokens of a micro-batch
    config: RunConfig  # with the decided memory of the engines
    notes: tuple[str, ...] = ()


def decide_memory(config: RunConfig, checked: CheckedTask, agents: Sequence[Agent]) -> MemoryDecision:
    """Return the decision, from estimates of the agents' memory on their GPUs."""
    levels: dict[str, OffloadLevel] = {agent.name: "never" for agent in agents}
    setting, tokens = config.learning.offload, config.learning.micro_batch_tokens
    if all(agent.device.type == "cpu" for agent in agents):
        return MemoryDecision(levels, {agent.name: tokens or FEW_TOKENS for agent in agents}, config)
    shapes = _shapes(config, checked, agents)
    config, engine_notes = decide_engine_memory(config, shapes)
    sizes = choose_micro_batch_tokens(config, shapes)
    if setting == "never":
        return MemoryDecision(levels, sizes, config, engine_notes)
    known = footprints(config, shapes, sizes)
    plans = offload_plans(config, shapes, known)
    notes = list(engine_notes)
    for device, names in agents_by_device(shapes).items():
        if device == "cpu":
            continue
        if device not in plans:
            level: OffloadLevel = "never" if setting == "auto" else setting
            note: str | None = (
                f"learning.offload counts as {level} on {device}: an agent's layers are unusual, so its "
                "memory cannot be estimated"
            )
        else:
            level = plans[device].level
            before = peak_bytes("never", [known[name] for name in names])
            note = offload_note(device, plans[device], setting, before, device_bytes(device))
        levels |= dict.fromkeys([name for name in names if name not in shapes.ranks], level)
        notes += [note] if note else []
    return MemoryDecision(levels, sizes, config, tuple(notes))


def _shapes(config: RunConfig, checked: CheckedTask, agents: Sequence[Agent]) -> AgentShapes:
    """Return the shapes of loaded agents, whose prompts and parameters can be counted."""
    settings = {agent.name: agent for agent in config.agents}
    problems = [*checked.train, *checked.test]
    longest = {agent.name: agent.longest_prompt(problems) for agent in agents}
    return AgentShapes(
        devices={agent.name: str(agent.device) for agent in agents},
        configs={agent.name: agent.model.config for agent in agents},
        prompt_tokens=longest,
        counted={
            (agent.name, settings[agent.name].lora): _counts(agent, settings[agent.name].frozen)
            for agent in agents
        },
        ranks=ranks_of(config),
        whole_logits=frozenset(agent.name for agent in agents if separate_head(agent.model) is None),
    )


def _counts(agent: Agent, is_frozen: bool) -> ParameterCounts:
    sizes = [parameter.numel() for parameter in agent.model.parameters()]
    trained = [parameter.numel() for parameter in agent.model.parameters() if parameter.requires_grad]
    trained = [] if is_frozen else trained
    adapters = sum(trained) if is_adapted(agent.model) else 0
    return ParameterCounts(
        base=sum(sizes) - adapters,
        adapters=adapters,
        trainable=sum(trained),
        largest=max(trained, default=0),
    )
