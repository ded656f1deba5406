"""Estimate what a run needs of every device's memory, and what to change where it does not fit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from hacrl.config.schema import (
    FEW_TOKENS,
    MANY_TOKENS,
    AgentSettings,
    LoraSettings,
    OffloadLevel,
    RunConfig,
)
from hacrl.engines.registry import kind_of
from hacrl.errors import ModelError
from hacrl.memory.host import total_bytes
from hacrl.memory.offload_plan import COMFORTABLE, OffloadPlan, peak_bytes, plan_offload
from hacrl.models.device import rank_devices
from hacrl.models.footprint import (
    Decoding,
    Footprint,
    ParameterCounts,
    Workload,
    agent_footprint,
    changes_logits,
    count_parameters,
)

ASSUMED_PROMPT_TOKENS = 1024  # where the length of prompts is not known
WORTHWHILE = 0.95  # advice must reduce the need to this share at most
# Tokens x parameters of a pass that keeps a GPU busy: 6 FLOPs for each take 0.3 s at 400 TFLOP/s.
BUSY_TOKEN_PARAMETERS = 2e13
ADVISED_LORA = LoraSettings(rank=64, alpha=128.0)


@dataclass(frozen=True)
class Advice:
    """A change of the run's settings, and the bytes that the device then needs."""

    change: str
    needed: int


@dataclass(frozen=True)
class DeviceMemory:
    """One device: its agents, and the bytes they need at their peak."""

    device: str
    agents: tuple[str, ...]
    needed: int | None  # None: an agent's shape is not known
    available: int
    advice: tuple[Advice, ...] = ()  # only if it does not fit
    offload: OffloadLevel = "never"
    host: int = 0  # bytes of the machine's memory for what is offloaded

    @property
    def fits(self) -> bool:
        """Whether there is enough memory, as far as known."""
        return self.needed is None or self.needed <= self.available


@dataclass(frozen=True)
class AgentShapes:
    """What is known of the agents before or after they are loaded. All mappings are by agent name."""

    devices: Mapping[str, str]
    configs: Mapping[str, Any]  # model configs, of agents for which there is one
    prompt_tokens: Mapping[str, int]  # of the longest prompt, if known
    counted: dict[tuple[str, LoraSettings | None], ParameterCounts] = field(default_factory=dict)
    whole_logits: frozenset[str] = frozenset()  # agents whose logits cannot be computed in pieces
    ranks: Mapping[str, int] = field(default_factory=dict)  # of agents with several

    def has_whole_logits(self, name: str) -> bool:
        """Return whether the agent's logits cannot be computed in pieces."""
        return name in self.whole_logits or changes_logits(self.configs[name])

    def counts(self, agent: AgentSettings) -> ParameterCounts:
        """Return the agent's parameter counts; they are cached, because advice needs them repeatedly."""
        key = (agent.name, agent.lora)
        if key not in self.counted:
            self.counted[key] = count_parameters(agent, self.configs[agent.name])
        return self.counted[key]


def ranks_of(config: RunConfig) -> dict[str, int]:
    """Return agent -> ranks, of agents with several."""
    return {agent.name: agent.ranks for agent in config.agents if agent.ranks > 1}


def workload(
    config: RunConfig, agent: AgentSettings, prompt_tokens: int, micro_batch_tokens: int
) -> Workload:
    """Return what one agent generates and trains on in a run."""
    rollout, evaluation = config.rollout, config.evaluation
    kind = kind_of(config, agent)
    most = kind.sequences_at_once(agent, rollout)

    def decoding(prompts: int, samples: int, new_tokens: int) -> Decoding:
        concurrent = min(prompts, max(1, most // samples))
        return Decoding(
            prompts=concurrent,
            responses=min((concurrent if kind.shares_weights else prompts) * samples, most),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )

    decodings = [
        decoding(rollout.prompts_per_step, config.rollouts_per_prompt(agent), rollout.max_new_tokens)
    ]
    if evaluation.most_problems:
        new_tokens = evaluation.sampling(rollout.sampling).max_new_tokens
        decodings.append(decoding(evaluation.most_problems, evaluation.samples_per_problem, new_tokens))
    longest = decodings[0].longest
    if not kind.shares_weights:  # the KV cache always has room for one request of the greatest length
        decodings.append(decoding(1, 1, max(0, kind.longest_sequence(agent) - prompt_tokens)))
    return Workload(
        decodings=tuple(decodings),
        learnt_tokens=max(micro_batch_tokens, longest),
        longest_sample=longest,
        filtered=rollout.top_k > 0 or rollout.top_p < 1,
        reference=config.method.choices.kl_coefficient > 0,
        compiled=config.learning.compile,
    )


def footprints(
    config: RunConfig, shapes: AgentShapes, micro_batch_tokens: Mapping[str, int] | None = None
) -> dict[str, Footprint]:
    """Return agent -> its memory, for agents whose shape is known and usual."""
    tokens = choose_micro_batch_tokens(config, shapes) if micro_batch_tokens is None else micro_batch_tokens
    found = {}
    for agent in config.agents:
        if agent.name not in shapes.configs:
            continue
        prompt_tokens = shapes.prompt_tokens.get(agent.name)
        prompt_tokens = prompt_tokens or config.rollout.max_prompt_tokens or ASSUMED_PROMPT_TOKENS
        device = torch.device(shapes.devices[agent.name])
        work = workload(config, agent, prompt_tokens, tokens[agent.name])
        try:
            work = replace(work, whole_logits=shapes.has_whole_logits(agent.name))
            model = shapes.configs[agent.name]
            footprint = agent_footprint(agent, model, shapes.counts(agent), device.type, work)
        except (AttributeError, NotImplementedError, RuntimeError):
            continue  # unusual: a model without attention heads, or one that cannot be built without weights
        if agent.frozen and config.asynchronous.is_on:  # it samples while others learn, not in turns
            footprint = replace(footprint, engine=footprint.rollout, cache=0, decoding=0)
        if not kind_of(config, agent).shares_weights:
            footprint = _with_engine(config, footprint, agent, device)
        found[agent.name] = footprint
    return found


def choose_micro_batch_tokens(config: RunConfig, shapes: AgentShapes) -> dict[str, int]:
    """Return agent -> most tokens of a micro-batch.

    If the settings say nothing, a GPU gets as many as keep it busy and fit into its memory.
    """
    configured = config.learning.micro_batch_tokens
    chosen = dict.fromkeys((agent.name for agent in config.agents), configured or FEW_TOKENS)
    if configured is not None:
        return chosen
    known = footprints(config, shapes, chosen)
    for device, plan in offload_plans(config, shapes, known).items():
        names = agents_by_device(shapes)[device]
        most = FEW_TOKENS if device == "cpu" else MANY_TOKENS
        while most > FEW_TOKENS:
            tried = {name: min(most, _tokens_that_keep_busy(known[name].counts.total)) for name in names}
            larger = footprints(config, shapes, chosen | tried)
            needed = peak_bytes(plan.level, [larger[name] for name in names])  # with no more offloading
            if needed <= COMFORTABLE * device_bytes(device):
                chosen |= tried
                break
            most //= 2
    return chosen


def _tokens_that_keep_busy(parameters: int) -> int:
    """Return tokens that a GPU computes on for longer than Python takes to prepare the next ones."""
    tokens = FEW_TOKENS
    while tokens < MANY_TOKENS and tokens * parameters < BUSY_TOKEN_PARAMETERS:
        tokens *= 2
    return tokens


def _with_engine(
    config: RunConfig, footprint: Footprint, agent: AgentSettings, device: torch.device
) -> Footprint:
    """Add an engine with weights of its own: its memory is held always, or only while agents answer."""
    kind = kind_of(config, agent)
    taken = kind.memory(footprint, agent, device, device_bytes(str(device)))
    footprint = replace(footprint, decoding=0, copy=0, taken_by_engine=taken)
    if kind.gives_memory_back(agent, device):
        return replace(footprint, cache=taken)
    return replace(footprint, cache=0, engine=taken)


def device_memory(
    config: RunConfig, shapes: AgentShapes, known: Mapping[str, Footprint]
) -> list[DeviceMemory]:
    """Return every device in use, with advice where it is too small."""
    plans = offload_plans(config, shapes, known)
    found = []
    for device, names in agents_by_device(shapes).items():
        available, plan = device_bytes(device), plans.get(device)
        if plan is None:
            memory = DeviceMemory(device, names, None, available)
        else:
            host = plan.host + sum(known[name].host for name in names)
            memory = DeviceMemory(device, names, plan.needed, available, offload=plan.level, host=host)
        if not memory.fits:
            memory = replace(memory, advice=tuple(_advice(config, shapes, memory)))
        found.append(memory)
    return found


def agents_by_device(shapes: AgentShapes) -> dict[str, tuple[str, ...]]:
    """Return device -> the names of its agents. A rank of an agent counts as the agent."""
    agents: dict[str, tuple[str, ...]] = {}
    for name, first in shapes.devices.items():
        for device in dict.fromkeys(rank_devices(first, shapes.ranks.get(name, 1))):
            agents[device] = (*agents.get(device, ()), name)
    return agents


def offload_plans(
    config: RunConfig, shapes: AgentShapes, known: Mapping[str, Footprint]
) -> dict[str, OffloadPlan]:
    """Return device -> what is offloaded from it; only for devices all of whose agents are known."""
    plans: dict[str, OffloadPlan] = {}
    for device, names in agents_by_device(shapes).items():
        if all(name in known for name in names):
            host = device_bytes("cpu") - sum(plan.host for plan in plans.values())
            found = [known[name] for name in names]
            # agents with several ranks have their devices for themselves, and fsdp.cpu_offload
            offload = "never" if shapes.ranks.keys() & set(names) else config.learning.offload
            plans[device] = plan_offload(offload, found, device, device_bytes(device), host)
    return plans


def canonical(device: str) -> str:
    """Return the device with its number: ``cuda`` and ``cuda:0`` are one device."""
    return "cuda:0" if device == "cuda" else device


def device_bytes(device: str) -> int:
    """Return the size of a GPU's memory, or of the machine's or container's; others may use some of it."""
    if device == "cpu":
        return total_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.mem_get_info(device)[1]


Change = Callable[[RunConfig], RunConfig]


def _advice(config: RunConfig, shapes: AgentShapes, memory: DeviceMemory) -> Iterator[Advice]:
    """Yield changes that reduce what this device needs, each made alone."""
    assert memory.needed is not None
    for text, change in _changes(config):
        try:
            after = footprints(change(config), shapes)
        except ModelError:
            continue  # adapters need peft, and layers that they fit
        if not after.keys() >= set(memory.agents):
            continue
        needed = offload_plans(change(config), shapes, after)[memory.device].needed
        if needed < WORTHWHILE * memory.needed:
            yield Advice(text, needed)
    if len(memory.agents) > 1:
        host = device_bytes("cpu")
        largest = max(
            plan_offload(config.learning.offload, [footprint], memory.device, memory.available, host).needed
            for name, footprint in footprints(config, shapes).items()
            if name in memory.agents
        )
        example = f"agents.{memory.agents[-1]}.device=cuda:1"
        yield Advice(f"a device for each agent, e.g. {example}", largest)


def _changes(config: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield settings that may save memory, as text and as a change of the run."""
    if any(agent.lora is None for agent in config.agents):
        lora = ADVISED_LORA
        yield (
            f"agent_defaults.lora.rank={lora.rank} agent_defaults.lora.alpha={lora.alpha:g}",
            lambda run: _with_agents(run, lora=lora),
        )
    if not all(agent.gradient_checkpointing for agent in config.agents):
        yield (
            "agent_defaults.gradient_checkpointing=true",
            lambda run: _with_agents(run, gradient_checkpointing=True),
        )
    if config.method.choices.kl_coefficient > 0:
        yield (
            "method.kl_coefficient=0",
            lambda run: replace(run, method=replace(run.method, kl_coefficient=0.0)),
        )
    yield from _changes_of_ranks(config)
    if config.learning.offload != "auto":
        yield (
            "learning.offload=auto",
            lambda run: replace(run, learning=replace(run.learning, offload="auto")),
        )
    fewer = max(1, config.rollout.max_batch // 4)
    yield (
        f"rollout.max_batch={fewer}",
        lambda run: replace(run, rollout=replace(run.rollout, max_batch=fewer)),
    )
    tokens = max(1, (config.learning.micro_batch_tokens or FEW_TOKENS) // 4)
    yield (
        f"learning.micro_batch_tokens={tokens}",
        lambda run: replace(run, learning=replace(run.learning, micro_batch_tokens=tokens)),
    )
    length = max(1, config.rollout.max_new_tokens // 2)
    yield (
        f"rollout.max_new_tokens={length}",
        lambda run: replace(run, rollout=replace(run.rollout, max_new_tokens=length)),
    )


def _changes_of_ranks(config: RunConfig) -> Iterator[tuple[str, Change]]:
    """Yield more ranks, as long as there are GPUs for them, and their offloading."""
    for agent in config.agents:
        more = 2 * agent.ranks
        if more <= torch.cuda.device_count() and len(config.agents) == 1:
            yield f"agents.{agent.name}.ranks={more}", partial(_with_agent, agent=agent.name, ranks=more)
        if agent.ranks > 1 and not agent.fsdp.cpu_offload:
            fsdp = replace(agent.fsdp, cpu_offload=True)
            yield (
                f"agents.{agent.name}.fsdp.cpu_offload=true",
                partial(_with_agent, agent=agent.name, fsdp=fsdp),
            )


def _with_agent(config: RunConfig, agent: str, **changes: Any) -> RunConfig:
    agents = (replace(one, **changes) if one.name == agent else one for one in config.agents)
    return replace(config, agents=tuple(agents))


def _with_agents(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, agents=tuple(replace(agent, **changes) for agent in config.agents))
