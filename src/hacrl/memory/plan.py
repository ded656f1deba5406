"""What a run needs of every device's memory, whether it is there, and what would help if not.

What agents on a GPU send to the machine's memory while they do not need it, and what that saves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch

from hacrl.config.schema import (
    FEW_TOKENS,
    MANY_TOKENS,
    WEIGHTS_LEAVE,
    AgentSettings,
    LoraSettings,
    Offload,
    OffloadLevel,
    RunConfig,
)
from hacrl.engines.registry import kind_of
from hacrl.errors import ModelError
from hacrl.memory.host import bytes_allowed
from hacrl.models.footprint import (
    FLOAT32,
    Decoding,
    Footprint,
    ParameterCounts,
    Workload,
    agent_footprint,
    changes_logits,
    count_parameters,
    peak_together,
)
from hacrl.training.gradients import COMING, LEAVING
from hacrl.training.optimizer import STREAMED_AT_ONCE
from hacrl.training.optimizer_block import PIECE

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
    kind = kind_of(config, agent)
    most = kind.sequences_at_once(agent, rollout)

    def decoding(prompts: int, samples: int, new_tokens: int) -> Decoding:
        at_once = min(prompts, max(1, most // samples))
        return Decoding(
            prompts=at_once,
            responses=min((at_once if kind.shares_weights else prompts) * samples, most),
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
    if not kind.shares_weights:  # its cache holds one sequence of the greatest length in any case
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
        if not kind_of(config, agent).shares_weights:
            footprint = _with_engine(config, footprint, agent, torch.device(sized.devices[agent.name]))
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


def _with_engine(
    config: RunConfig, footprint: Footprint, agent: AgentSettings, device: torch.device
) -> Footprint:
    """Add the memory of an engine with weights of its own, held always or only while agents answer."""
    kind = kind_of(config, agent)
    taken = kind.memory(footprint, agent, device, available_bytes(str(device)))
    footprint = replace(footprint, decoding=0, taken_by_engine=taken)
    if kind.gives_memory_back(agent, device):
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
    if config.method.choices.kl_coefficient > 0:
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
