"""What a run needs of every device's memory, whether it is there, and what would help if not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hacrl.agents.footprint import (
    Decoding,
    Footprint,
    ParameterCounts,
    Workload,
    agent_footprint,
    changes_logits,
    count_parameters,
)
from hacrl.agents.settings import AgentSettings, LoraSettings
from hacrl.config.schema import RunConfig
from hacrl.errors import ModelError
from hacrl.execution.host_memory import bytes_allowed
from hacrl.execution.offloading import COMFORTABLE, OffloadPlan, peak_with, plan_offload
from hacrl.learning.settings import FEW_TOKENS, MANY_TOKENS, OffloadLevel

ASSUMED_PROMPT_TOKENS = 1024  # where nothing says how long prompts are
WORTH_SAYING = 0.95  # advice must save a twentieth at least
BUSY = 2e13  # tokens x parameters of a pass: 6 FLOPs for each are 0.3 s at 400 TFLOP/s
ADVISED_LORA = LoraSettings(rank=64, alpha=128.0)


@dataclass(frozen=True)
class Advice:
    """A change of the run, and what the device would then need."""

    change: str
    needed: int


@dataclass(frozen=True)
class DeviceMemory:
    """One device: who lives there, and the bytes they need at their peak."""

    device: str
    agents: tuple[str, ...]
    needed: int | None  # None: an agent's shape is not known
    available: int
    advice: tuple[Advice, ...] = ()  # only if it does not fit
    offload: OffloadLevel = "never"  # what leaves the device while it is not needed ...
    host: int = 0  # ... and the bytes it takes of the machine's memory

    @property
    def fits(self) -> bool:
        """Whether there is enough, as far as known."""
        return self.needed is None or self.needed <= self.available


@dataclass(frozen=True)
class Sized:
    """What is known of the agents: where they live, config of the model, longest prompt."""

    devices: Mapping[str, str]
    configs: Mapping[str, Any]  # those that are known
    prompt_tokens: Mapping[str, int]
    counted: dict[tuple[str, LoraSettings | None], ParameterCounts] = field(default_factory=dict)
    whole_logits: frozenset[str] = frozenset()  # agents whose output layer was found not to give their logits

    def makes_whole_logits(self, name: str) -> bool:
        """Whether a learner's logits cannot be made a piece at a time."""
        return name in self.whole_logits or changes_logits(self.configs[name])

    def counts(self, agent: AgentSettings) -> ParameterCounts:
        """Numbers of weights, counted once: advice asks again and again."""
        key = (agent.name, agent.lora)
        if key not in self.counted:
            self.counted[key] = count_parameters(agent, self.configs[agent.name])
        return self.counted[key]


def workload(
    config: RunConfig, agent: AgentSettings, prompt_tokens: int, micro_batch_tokens: int
) -> Workload:
    """What one agent does in a run."""
    rollout, evaluation = config.rollout, config.evaluation
    by_vllm = config.engine(agent) == "vllm"
    most = _most_by_vllm(agent) if by_vllm else rollout.max_batch

    def decoding(prompts: int, samples: int, new_tokens: int) -> Decoding:
        at_once = min(prompts, max(1, most // samples))
        return Decoding(
            prompts=at_once,
            responses=min((prompts if by_vllm else at_once) * samples, most),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
        )

    decodings = [
        decoding(rollout.prompts_per_step, config.rollouts_per_prompt(agent), rollout.max_new_tokens)
    ]
    if evaluation.most_problems:
        new_tokens = evaluation.sampling(rollout.max_new_tokens).max_new_tokens
        decodings.append(decoding(evaluation.most_problems, evaluation.samples_per_problem, new_tokens))
    longest = decodings[0].longest
    if by_vllm:  # which has room for one request of the greatest length, whoever asks for that
        greatest = agent.vllm.engine_args.get("max_model_len", agent.vllm.max_length) or 0
        decodings.append(decoding(1, 1, max(0, int(greatest) - prompt_tokens)))
    return Workload(
        decodings=tuple(decodings),
        learnt_tokens=max(micro_batch_tokens, longest),
        longest_sample=longest,
        filtered=rollout.top_k > 0 or rollout.top_p < 1,
        reference=config.method.kl_coefficient > 0,
        compiled=config.learning.compile,
    )


def _most_by_vllm(agent: AgentSettings) -> int:
    """Responses that its engine decodes side by side."""
    from hacrl.rollout.vllm.launch import sequences_at_once

    return sequences_at_once(agent.vllm)


def footprints(
    config: RunConfig, sized: Sized, micro_batch_tokens: Mapping[str, int] | None = None
) -> dict[str, Footprint]:
    """Agent -> its memory, for the agents whose shape is known and usual."""
    learnt = choose_micro_batch_tokens(config, sized) if micro_batch_tokens is None else micro_batch_tokens
    found = {}
    for agent in config.agents:
        if agent.name not in sized.configs:
            continue
        tokens = sized.prompt_tokens.get(agent.name)
        tokens = tokens or config.rollout.max_prompt_tokens or ASSUMED_PROMPT_TOKENS
        device = torch.device(sized.devices[agent.name]).type
        model = sized.configs[agent.name]
        work = workload(config, agent, tokens, learnt[agent.name])
        try:
            work = replace(work, whole_logits=sized.makes_whole_logits(agent.name))
            footprint = agent_footprint(agent, model, sized.counts(agent), device, work)
        except (AttributeError, NotImplementedError, RuntimeError):
            continue  # an unusual architecture: without attention heads, or one that cannot be built unfilled
        if config.engine(agent) == "vllm":
            footprint = _with_vllm(footprint, agent, torch.device(sized.devices[agent.name]))
        found[agent.name] = footprint
    return found


def choose_micro_batch_tokens(config: RunConfig, sized: Sized) -> dict[str, int]:
    """Agent -> most tokens of a forward pass: as configured or, on a GPU, as many as keep it busy and fit."""
    given = config.learning.micro_batch_tokens
    chosen = dict.fromkeys((agent.name for agent in config.agents), given or FEW_TOKENS)
    if given is not None:
        return chosen
    known = footprints(config, sized, chosen)
    for device, plan in offload_plans(config, sized, known).items():
        names = agents_by_device(sized)[device]
        most = FEW_TOKENS if device == "cpu" else MANY_TOKENS
        while most > FEW_TOKENS:
            tried = {name: min(most, _tokens_that_keep_busy(known[name].counts.total)) for name in names}
            larger = footprints(config, sized, chosen | tried)
            needed = peak_with(plan.level, [larger[name] for name in names])  # nothing more need leave
            if needed <= COMFORTABLE * available_bytes(device):
                chosen |= tried
                break
            most //= 2
    return chosen


def _tokens_that_keep_busy(parameters: int) -> int:
    """A GPU computes on them for longer than Python prepares the next ones, which it does meanwhile."""
    tokens = FEW_TOKENS
    while tokens < MANY_TOKENS and tokens * parameters < BUSY:
        tokens *= 2
    return tokens


def _with_vllm(footprint: Footprint, agent: AgentSettings, device: torch.device) -> Footprint:
    """Responses come from an engine: its share of the device, held always or while it is awake."""
    from hacrl.rollout.vllm.launch import sleeps
    from hacrl.rollout.vllm.room import engine_bytes

    taken = engine_bytes(footprint, device, agent.vllm, available_bytes(str(device)))
    footprint = replace(footprint, decoding=0, taken_by_engine=taken)
    if sleeps(device, agent.vllm):
        return replace(footprint, cache=taken)
    return replace(footprint, cache=0, engine=taken)


def device_memory(config: RunConfig, sized: Sized, known: Mapping[str, Footprint]) -> list[DeviceMemory]:
    """Every device in use, with advice where it is too small."""
    plans = offload_plans(config, sized, known)
    found = []
    for device, names in agents_by_device(sized).items():
        available, plan = available_bytes(device), plans.get(device)
        if plan is None:
            memory = DeviceMemory(device, names, None, available)
        else:
            memory = DeviceMemory(device, names, plan.needed, available, offload=plan.level, host=plan.host)
        if not memory.fits:
            memory = replace(memory, advice=tuple(_advice(config, sized, memory)))
        found.append(memory)
    return found


def agents_by_device(sized: Sized) -> dict[str, tuple[str, ...]]:
    """Who lives where."""
    places: dict[str, tuple[str, ...]] = {}
    for name, device in sized.devices.items():
        places[same_name(device)] = (*places.get(same_name(device), ()), name)
    return places


def offload_plans(config: RunConfig, sized: Sized, known: Mapping[str, Footprint]) -> dict[str, OffloadPlan]:
    """Device -> what leaves it while it is not needed; only devices all of whose agents are known."""
    plans: dict[str, OffloadPlan] = {}
    for device, names in agents_by_device(sized).items():
        if all(name in known for name in names):
            host = available_bytes("cpu") - sum(plan.host for plan in plans.values())
            footprints = [known[name] for name in names]
            asked = config.learning.offload
            plans[device] = plan_offload(asked, footprints, device, available_bytes(device), host)
    return plans


def same_name(device: str) -> str:
    """``cuda`` and ``cuda:0`` are one device."""
    return "cuda:0" if device == "cuda" else device


def available_bytes(device: str) -> int:
    """All of a GPU's memory, or of the machine's or the container's: others may use some of it."""
    if device == "cpu":
        return bytes_allowed() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.cuda.mem_get_info(device)[1]


Change = Callable[[RunConfig], RunConfig]


def _advice(config: RunConfig, sized: Sized, memory: DeviceMemory) -> Iterator[Advice]:
    """Changes that save something on this device, each alone, with what is then needed."""
    assert memory.needed is not None
    for text, change in _changes(config):
        try:
            after = footprints(change(config), sized)
        except ModelError:
            continue  # nothing to advise here: adapters need peft, and layers that they fit
        if not after.keys() >= set(memory.agents):
            continue
        needed = offload_plans(change(config), sized, after)[memory.device].needed
        if needed < WORTH_SAYING * memory.needed:
            yield Advice(text, needed)
    if len(memory.agents) > 1:
        host = available_bytes("cpu")
        largest = max(
            plan_offload(config.learning.offload, [one], memory.device, memory.available, host).needed
            for name, one in footprints(config, sized).items()
            if name in memory.agents
        )
        example = f"agents.{memory.agents[-1]}.device=cuda:1"
        yield Advice(f"a device for each agent, e.g. {example}", largest)


def _changes(config: RunConfig) -> Iterator[tuple[str, Change]]:
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
    if config.method.kl_coefficient > 0:
        yield (
            "method.kl_coefficient=0",
            lambda run: replace(run, method=replace(run.method, kl_coefficient=0.0)),
        )
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


def _with_agents(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, agents=tuple(replace(agent, **changes) for agent in config.agents))
