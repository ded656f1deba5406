"""How a run's loaded agents share the memory of their devices: decided once, before optimizers are made."""

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
)
from hacrl.memory.offload_plan import offload_note, peak_bytes
from hacrl.models.agent import Agent
from hacrl.models.footprint import ParameterCounts
from hacrl.models.lm_head import separate_head
from hacrl.models.lora import is_adapted
from hacrl.tasks.base import CheckedTask


@dataclass(frozen=True)
class MemoryDecision:
    """By agent, and sentences about it for the user."""

    levels: dict[str, OffloadLevel]  # what leaves its device while it is not needed
    micro_batch_tokens: dict[str, int]  # that it learns from at a time
    config: RunConfig  # the run, with its engines' memory decided
    notes: tuple[str, ...] = ()


def decide_memory(config: RunConfig, checked: CheckedTask, agents: Sequence[Agent]) -> MemoryDecision:
    """By what the agents' memory is estimated to be, on the GPUs they are on."""
    levels: dict[str, OffloadLevel] = {agent.name: "never" for agent in agents}
    asked, tokens = config.learning.offload, config.learning.micro_batch_tokens
    if all(agent.device.type == "cpu" for agent in agents):
        return MemoryDecision(levels, {agent.name: tokens or FEW_TOKENS for agent in agents}, config)
    sized = _sized(config, checked, agents)
    config, settled = decide_engine_memory(config, sized)
    sizes = choose_micro_batch_tokens(config, sized)
    if asked == "never":
        return MemoryDecision(levels, sizes, config, settled)
    known = footprints(config, sized, sizes)
    plans = offload_plans(config, sized, known)
    notes = list(settled)
    for device, names in agents_by_device(sized).items():
        if device == "cpu":
            continue
        if device not in plans:
            level: OffloadLevel = "never" if asked == "auto" else asked
            note: str | None = (
                f"learning.offload counts as {level} on {device}: an agent's layers are unusual, so that "
                "what it needs of the memory is not known"
            )
        else:
            level = plans[device].level
            before = peak_bytes("never", [known[name] for name in names])
            note = offload_note(device, plans[device], asked, before, device_bytes(device))
        levels |= dict.fromkeys(names, level)
        notes += [note] if note else []
    return MemoryDecision(levels, sizes, config, tuple(notes))


def _sized(config: RunConfig, checked: CheckedTask, agents: Sequence[Agent]) -> AgentShapes:
    """What is known of agents that are loaded: everything."""
    settings = {one.name: one for one in config.agents}
    problems = (*checked.train, *checked.test)
    longest = {agent.name: max(len(agent.encode_prompt(one)) for one in problems) for agent in agents}
    return AgentShapes(
        devices={agent.name: str(agent.device) for agent in agents},
        configs={agent.name: agent.model.config for agent in agents},
        prompt_tokens=longest,
        counted={(agent.name, settings[agent.name].lora): _counts(agent) for agent in agents},
        whole_logits=frozenset(agent.name for agent in agents if separate_head(agent.model) is None),
    )


def _counts(agent: Agent) -> ParameterCounts:
    sizes = [parameter.numel() for parameter in agent.model.parameters()]
    trained = [parameter.numel() for parameter in agent.model.parameters() if parameter.requires_grad]
    adapters = sum(trained) if is_adapted(agent.model) else 0
    return ParameterCounts(
        base=sum(sizes) - adapters,
        adapters=adapters,
        trainable=sum(trained),
        largest=max(trained, default=0),
    )
