"""The options of every method, as plain frozen records with the paper's defaults.

The config layer validates user input straight into these, so an option exists in exactly one place.
Where the paper and its public code differ, the default follows the paper: see ``docs/paper_map.md``.

How answers are checked: how many worker processes, and how long one answer may take.

What a user says about the task.

What a user says about how one agent's responses are generated.

What a user says about one agent.

How an agent turns its samples of one step into parameter updates.

When an agent's policy counts as collapsed.

What is asked in a step, and how answers are sampled.

How long the rollout log keeps what it has written.

How often a run's whole state is written down, and how much of that is kept.

How agents are evaluated.

A run, as its user describes it. Each section is defined in the layer that uses it.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from hacrl.types import RatioLength, Sampling

ROUNDING = 1e-9  # an interval narrower than this is empty but for rounding

CapabilityMeasure = Literal["mean_reward", "positive_share"]


@dataclass(frozen=True, kw_only=True)
class CapabilitySettings:
    """How capability is measured, and how far apart two agents may be taken to be."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    window: int = 5  # K: steps that count
    floor: float = 1e-8  # a step's capability is never below this, so that ratios exist
    ratio_min: float = 0.1
    ratio_max: float = 10.0
    measure: CapabilityMeasure = "mean_reward"
    reward_min: float = 0.0  # the reward that counts as no capability: the lowest, if rewards can be negative

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be at least 1 step, not {self.window}")
        if self.floor <= 0:
            raise ValueError(f"floor must be positive, not {self.floor}: a ratio divides by it")
        if not 0 < self.ratio_min <= 1 <= self.ratio_max:
            raise ValueError(
                f"ratio_min={self.ratio_min} and ratio_max={self.ratio_max} must enclose 1 and be positive"
            )


@dataclass(frozen=True, kw_only=True)
class NormaliserSettings:
    """The standard deviation that advantages are divided by."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    unbiased: bool = True  # divide by N - 1
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon must not be negative, not {self.epsilon}")


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """What all methods have in common."""

    shares_rollouts: ClassVar[bool] = False  # whether learners see other agents' responses
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    clip_low: float = 0.0003  # own responses are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.0004
    kl_coefficient: float = 0.0  # k3 penalty to the reference policy, own responses only
    std: NormaliserSettings = field(default_factory=NormaliserSettings)
    capability: CapabilitySettings = field(default_factory=CapabilitySettings)

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be in [0, 1), not {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must not be negative, not {self.clip_high}")
        if self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must not be negative, not {self.kl_coefficient}")

    def check_updates(self, updates_per_step: int) -> None:
        """Raise ValueError if the method cannot make so many updates in one step."""


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(MethodSettings):
    """GRPO, each agent alone: token-level ratio."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True)
class GspoSettings(MethodSettings):
    """GSPO, each agent alone: sequence-level ratio."""

    name: Literal["gspo"] = "gspo"


@dataclass(frozen=True, kw_only=True)
class NaiveSettings(MethodSettings):
    """Shared rollouts without the four mechanisms: joint mean and std, plain GSPO ratio and clip."""

    shares_rollouts: ClassVar[bool] = True
    name: Literal["naive"] = "naive"
    ratio_length: RatioLength = "source"


@dataclass(frozen=True, kw_only=True)
class HacpoSettings(MethodSettings):
    """HACPO: the four mechanisms, each with its switch."""

    shares_rollouts: ClassVar[bool] = True
    name: Literal["hacpo"] = "hacpo"
    ratio_length: RatioLength = "source"
    # mechanism 1: capability-aware advantage
    capability_baseline: bool = True  # False: omega = 1 in mu_k (ablation)
    cross_baseline: Literal["source", "learner"] = "source"  # whose mu a cross response is compared with
    baseline_overshoot: Literal["own_mean", "keep"] = "own_mean"  # what to do when mu_k > max_reward
    max_reward: float | None = None  # the largest possible reward; None: the task's, if it says so
    # mechanism 2: capability discrepancy coefficient
    discrepancy: bool = True  # False: cross advantages are not scaled (ablation)
    # mechanism 3: exponential importance sampling
    alpha: float = 1.0  # 0 switches it off
    exponent_on: Literal["clipped", "raw"] = "clipped"
    # mechanism 4: stepwise clipping
    cross_clip: bool = True  # False: cross ratios are not clipped (ablation)
    delta: float = 0.2
    delta_step: float = 0.025  # 0 switches the schedule off
    cross_upper: float = 1.0

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if self.alpha < 0:
            raise ValueError(f"alpha must not be negative, not {self.alpha}")
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must be in (0, 1), not {self.delta}: the lower bound is 1 - delta "
                "(the paper's table 5 lists the bound itself; its 0.8 is delta: 0.2)"
            )
        if self.delta_step < 0:
            raise ValueError(f"delta_step must not be negative, not {self.delta_step}")
        if self.cross_upper < 1:
            raise ValueError(f"cross_upper must be at least 1, not {self.cross_upper}")

    def check_updates(self, updates_per_step: int) -> None:
        """The stepwise clip interval must not close before the last update."""
        if self.cross_clip:
            check_schedule(self.delta, self.delta_step, self.cross_upper, updates_per_step)


AnyMethodSettings = GrpoSettings | GspoSettings | NaiveSettings | HacpoSettings


def check_schedule(delta: float, delta_step: float, upper: float, updates_per_step: int) -> None:
    """Refuse a schedule whose interval becomes empty before the step's last update."""
    bounds = [1.0 - delta + u * delta_step for u in range(updates_per_step)]
    usable = sum(bound < upper - ROUNDING for bound in bounds)
    if usable == updates_per_step:
        return
    last_bound = bounds[-1]
    largest = (upper - 1.0 + delta) / max(updates_per_step - 1, 1)
    raise ValueError(
        f"the cross-agent clip interval [1 - delta + u * delta_step, upper] is empty from update "
        f"{usable + 1} of {updates_per_step} on (delta={delta}, delta_step={delta_step}, upper={upper}, "
        f"last lower bound {last_bound:.4g}): use delta_step below {largest:.4g}, a larger "
        "delta, or fewer updates per step"
    )


MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class VerifierSettings:
    """The worker processes that compare answers symbolically. Plain numbers never reach them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    workers: int | None = None  # None: one per CPU core, at most 8
    time_limit: float = (
        5.0  # CPU seconds for one answer; hard: the worker is killed, at the latest after 10x by the clock
    )
    memory_limit: float | None = 2.0  # GiB of address space of a worker; None: no limit

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers} (leave it out: one per core)")
        if not 0 < self.time_limit < float("inf"):
            raise ValueError(f"time_limit must be a positive number of seconds, not {self.time_limit}")
        if self.memory_limit is not None and not self.memory_limit >= 0.5:
            raise ValueError(
                f"memory_limit must be at least 0.5 (GiB), not {self.memory_limit}: less does not load sympy"
            )

    @property
    def worker_count(self) -> int:
        """How many workers there may be at once."""
        if self.workers is not None:
            return self.workers
        return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """A task by name, with the options of that task, and how its answers are checked."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str = "arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)


EngineName = str  # transformers, vllm, an installed package's, or module:attribute
VllmMode = Literal["auto", "child", "server"]
WeightSync = Literal["auto", "ipc", "nccl", "gloo", "files"]
MOST_MEMORY = 0.3  # share of a GPU that an engine takes unless it is told to take more


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """One agent's vLLM engine: where it runs, what it may use, and how it gets the agent's weights."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    # "child": vLLM is installed beside hacrl, and runs in a process of its own; "server": hacrl starts vLLM's
    # server and looks after it. "auto": a server if `python` names an environment for it, else a child.
    mode: VllmMode = "auto"
    python: str | None = None  # interpreter of an environment that has vLLM; None: the one hacrl runs in
    url: str | None = None  # a server that is already running, e.g. http://gpu7:8000; hacrl starts none
    api_key_variable: str = "HACRL_VLLM_API_KEY"  # environment variable with the key of the server at `url`
    port: int | None = None  # of a server that hacrl starts, on 127.0.0.1; None: a free one
    devices: tuple[int, ...] | None = None  # the engine's CUDA devices; None: the agent's own
    memory: float | None = None  # share of the GPU, weights included; None: what it needs, up to 0.3
    kv_cache_gib: float | None = None  # fixed size of the key-value cache instead of a share; on a CPU 1
    max_sequences: int = 256  # responses decoded side by side, or up to 19 more: what a CUDA graph holds
    max_length: int | None = None  # prompt and response in tokens; None: what the task's prompts need
    sleep: bool | None = None  # give memory back between rollouts; None: if the learner needs it
    weight_sync: WeightSync = "auto"  # how weights travel; "auto": the best way the two ends have
    max_logprob_gap: float | None = None  # most nats per token between engine and learner
    seeded: bool = False  # a seed for every response: repeatable, but slower sampling on a GPU
    start_timeout: float = 900.0  # seconds until an engine must be ready
    restarts: int = 3  # how often an engine that died is started again, in one generation
    engine_args: dict[str, Any] = field(default_factory=dict)  # anything else vLLM takes, by its name there

    def __post_init__(self) -> None:
        if self.url is not None:
            self._check_url()
        if self.mode == "child" and self.python is not None:
            raise ValueError("python belongs to mode server: a child has hacrl's own interpreter")
        for key in ("memory", "kv_cache_gib", "max_logprob_gap", "start_timeout"):
            value = getattr(self, key)
            if value is not None and not value > 0:
                raise ValueError(f"{key} must be positive, not {value}")
        if self.memory is not None and self.memory > 1:
            raise ValueError(f"memory is a share of the GPU's memory, so at most 1, not {self.memory}")
        for key, least in (("max_sequences", 1), ("max_length", 2), ("restarts", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key} must be at least {least}, not {value}")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ValueError(f"port must be between 1 and 65535, not {self.port}")
        if self.devices is not None and (not self.devices or min(self.devices) < 0):
            raise ValueError(f"devices must name CUDA devices by number, not {list(self.devices)}")
        for key, value in self.engine_args.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"engine_args.{key}: {value!r} cannot be handed to another process; use text, numbers, "
                    "lists and mappings"
                ) from None

    def _check_url(self) -> None:
        assert self.url is not None
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must start with http:// or https://, not {self.url!r}")
        started = [key for key in ("python", "port", "devices") if getattr(self, key) is not None]
        if started or self.mode == "child":
            what = ", ".join(started) or "mode: child"
            raise ValueError(f"url names a server that is already running: {what} would have no effect")

    @property
    def starts_server(self) -> bool:
        """Whether hacrl starts and supervises a server for this agent."""
        if self.url is not None or self.mode == "child":
            return False
        return self.mode == "server" or self.python is not None


Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters instead of full fine-tuning. The reference policy is the model without them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    rank: int = 16
    alpha: float = 32.0  # the adapters' output is scaled by alpha / rank
    targets: str | tuple[str, ...] = "all-linear"  # names of the layers that get one

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise ValueError(f"rank must be between 1 and {2**16}, not {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, not {self.alpha}")
        if not self.targets:
            raise ValueError("targets must name layers, or be 'all-linear'")


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """One agent: any causal language model with its tokenizer. ``None`` takes the run's general setting."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str
    model: str  # "bundled:NAME", "smollm2-135m", a folder, or a Hugging Face id
    revision: str | None = None  # branch, tag or commit of a Hugging Face id
    rollouts_per_prompt: int | None = None
    lr: float | None = None
    device: str | None = None
    # weights: "auto" is float32 on a CPU, on a GPU what the model is stored in. Lower precisions are trained
    # through float32 master weights.
    precision: Precision = "auto"
    lora: LoraSettings | None = None  # None: all weights are trained
    gradient_checkpointing: bool = False  # less memory for a third more compute in learning
    attention: str | None = None  # transformers' attn_implementation: sdpa, eager, flash_attention_2, ...
    chat_template: bool = True  # use the tokenizer's chat template if it has one
    chat_template_args: dict[str, Any] = field(default_factory=dict)  # e.g. {enable_thinking: false}
    trust_remote_code: bool = False
    engine: EngineName | None = None  # what generates its responses
    vllm: VllmSettings = field(default_factory=VllmSettings)  # its engine, if that is vLLM

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name {self.name!r} becomes a folder name: use letters, digits, '.', '_' and '-' only"
            )
        if self.rollouts_per_prompt is not None and self.rollouts_per_prompt < 1:
            raise ValueError(f"rollouts_per_prompt must be at least 1, not {self.rollouts_per_prompt}")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"lr must be positive, not {self.lr}")


MinibatchOrder = Literal["mixed", "self_first"]
OldPolicy = Literal["auto", "sampler", "learner"]
OffloadLevel = Literal["never", "optimizer", "stream", "weights", "all"]  # each sends more away
Offload = Literal["auto", OffloadLevel]
WEIGHTS_LEAVE: tuple[OffloadLevel, ...] = ("weights", "all")  # those of agents not at work
STREAMING: tuple[OffloadLevel, ...] = ("stream", *WEIGHTS_LEAVE)  # optimizers are there for updates only
FEW_TOKENS, MANY_TOKENS = 4096, 32768  # of a micro-batch, if nobody has said how many


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Optimizer and mini-batches. Rollouts, updates and learning rate are set independently."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_source: int = 2  # a learner with n sources makes n times as many updates a step ...
    updates_per_step: int | None = None  # ... unless the number is given
    epochs: int = 1  # passes over the step's samples; multiplies the updates unless their number is given
    # Most responses of others per prompt that a learner learns from, those that teach most first; None: all.
    max_cross_rollouts: int | None = None
    minibatch_order: MinibatchOrder = "mixed"
    learn_stop_token: bool = True
    # Most tokens in one forward pass, fewer once memory runs out. None: 4096 or, on a GPU, as many as keep it
    # busy and fit, up to 32768.
    micro_batch_tokens: int | None = None
    compile: bool | None = None  # layers compiled by torch; None: on a GPU, large models of 16 bits
    # Whose log-probabilities of own rollouts are pi_old: the sampler's, or the learner's before the step's
    # first update. "auto": the learner's where the rollout engine's numerics differ from its own.
    old_policy: OldPolicy = "auto"
    mismatch_cap: float = 2.0  # C: the learner's pi_old over the sampler's weighs own rollouts, up to this
    # What agents on a GPU send to the machine's memory while they do not need it: nothing; masters and
    # moments of those that do not learn; these always, but for the update itself; also the weights of those
    # not at work; or also sums of gradients. "auto": as little as fits. No number changes.
    offload: Offload = "auto"
    max_bad_updates: int = 5  # updates in a row with a loss or gradient that is not finite; then the run ends

    def __post_init__(self) -> None:
        for key in ("updates_per_source", "epochs", "max_bad_updates"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 1:
            raise ValueError(
                f"micro_batch_tokens must be at least 1, not {self.micro_batch_tokens}; null means as many "
                "as suit the device"
            )
        if self.updates_per_step is not None and self.updates_per_step < self.epochs:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} must be at least epochs={self.epochs}: "
                "every pass over the samples makes an update"
            )
        if self.max_cross_rollouts is not None and self.max_cross_rollouts < 1:
            raise ValueError(
                f"max_cross_rollouts must be at least 1, not {self.max_cross_rollouts}; null means all, and "
                "agents that are to learn from themselves alone have method.name: gspo"
            )
        for key in ("lr", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} must be in [0, 1), not {getattr(self, key)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not self.mismatch_cap >= 1:
            raise ValueError(
                f"mismatch_cap must be at least 1, not {self.mismatch_cap}: a sampler that agrees with the "
                "learner has weight 1"
            )

    def recomputes_old_policy(self, exact_sampler: bool) -> bool:
        """Whether pi_old is the learner's; ``exact_sampler``: sampler and learner give the same numbers."""
        if self.old_policy == "auto":
            return not exact_sampler
        return self.old_policy == "learner"

    def updates(self, sources: int) -> int:
        """Parameter updates one learner makes in a step."""
        if self.updates_per_step is not None:
            return self.updates_per_step
        return self.updates_per_source * sources * self.epochs


@dataclass(frozen=True, kw_only=True)
class CollapseSettings:
    """When an agent counts as collapsed, and what is done about it."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    steps: int = 20  # in a row; 0: nobody looks
    action: Literal["note", "pause"] = "note"  # "pause": it neither answers nor learns; the others go on

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, not {self.steps} (0: off)")


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """One step asks every agent the same prompts; each answers every prompt several times."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    prompts_per_step: int = 16
    rollouts_per_prompt: int = 8  # G; an agent may have its own
    max_prompt_tokens: int | None = None  # longer ones are left out; None: one that does not fit is an error
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    engine: EngineName = "transformers"  # what generates responses; an agent may have its own
    max_batch: int = 512  # most responses of an agent that transformers decodes side by side
    compile: bool | None = None  # transformers' layers compiled; None: as learning.compile's

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "rollouts_per_prompt", "max_new_tokens", "max_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        if not self.temperature >= 0.01:
            raise ValueError(
                f"temperature must be at least 0.01, not {self.temperature}: learning needs sampling"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k} (0 means no limit)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of training rollouts."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True, kw_only=True)
class RolloutLogSettings:
    """Retention of ``RUN/rollouts``. Steps that a resumed run would need are always kept."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    keep: int | Literal["all", "none"] = "all"  # every step, none, or the last so many steps

    def __post_init__(self) -> None:
        if isinstance(self.keep, int) and self.keep < 1:
            raise ValueError(f"keep must be all, none or a number of steps of at least 1, not {self.keep}")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Everything needed to go on exactly: weights, optimizers, capabilities, position."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    every: int = 20  # steps, and at the end; 0: only when a run is stopped by a signal
    keep_last: int = 2  # the newest; more than one, so that a damaged one has a predecessor
    keep_best: int = 0  # besides those, the ones with the best mean held-out accuracy
    background: bool = (
        True  # write while the next step goes on; copying to the CPU's memory is all it waits for
    )

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, not {getattr(self, key)}")


DEFAULT_MAX_NEW_TOKENS = 8192  # the evaluation length of the paper
DEFAULT_PROBLEMS = 200  # of a run's own evaluations
DEFAULT_BATCH = 64  # responses of thousands of tokens: a cache of 64 fits where 512 would not


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Every agent alone, on held-out problems, before and after training, and in between if asked."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    problems: int | None = None  # None: all that are held out, at most 200; 0: no evaluation
    samples_per_problem: int = 4
    temperature: float = 1.0  # 0: greedy
    max_new_tokens: int | None = None  # None: as in training
    every: int = 0  # steps between evaluations; 0: only before and after training

    def __post_init__(self) -> None:
        for key in ("problems", "every"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key} must not be negative, not {value}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.samples_per_problem < 1:
            raise ValueError(f"samples_per_problem must be at least 1, not {self.samples_per_problem}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")

    @property
    def most_problems(self) -> int:
        """How many are asked if the task holds out enough."""
        return DEFAULT_PROBLEMS if self.problems is None else self.problems

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The distribution evaluation answers are drawn from; training's length unless one is set."""
        return Sampling(self.max_new_tokens or max_new_tokens, self.temperature)


@dataclass(frozen=True, kw_only=True)
class ExamSettings:
    """How ``hacrl eval`` asks. ``None``: the benchmark's own value, or that of the run whose task it is."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    samples: int | None = None  # k of avg@k
    pass_at: tuple[int, ...] = ()  # further k, for pass@k and best@k
    temperature: float | None = None  # None: greedy for one sample, 1 for several
    top_p: float = 1.0
    max_new_tokens: int | None = None  # None: DEFAULT_MAX_NEW_TOKENS, less where the context is shorter
    limit: int | None = None  # first problems only
    batch: int | None = None  # most responses decoded side by side
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("samples", "max_new_tokens", "limit", "batch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if any(k < 1 for k in self.pass_at):
            raise ValueError(f"pass_at must be at least 1, not {min(self.pass_at)}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.samples is not None and max(self.pass_at, default=1) > self.samples:
            raise ValueError(
                f"pass_at {max(self.pass_at)} draws more responses than there are: samples is "
                f"{self.samples}; use samples {max(self.pass_at)} or more"
            )

    def samples_of(self, default: int) -> int:
        """Responses per problem: as asked, else the benchmark's number, but enough for every pass@k."""
        return self.samples or max(default, *self.pass_at, 1)

    def temperature_of(self, samples: int) -> float:
        """Equal greedy responses tell no more than one: several are sampled."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if samples == 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the outcome of a run, and where it is written."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic

    agents: tuple[AgentSettings, ...]
    output: str  # folder of this run
    steps: int = 100
    seed: int = 0
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": a GPU if there is one
    executor: str = "local"  # where agents' workers live: local, or module:function
    threads: int | None = None  # CPU threads of torch; None leaves its own choice
    logged_rollouts: int = 4  # rollouts per agent and step in trackers' tables
    trackers: tuple[str, ...] = ()  # where metrics also go: tensorboard, wandb, trackio, mlflow
    project: str = "hacrl"  # what trackers file this run under ...
    run_name: str | None = None  # ... and its name there; None: the output folder's
    task: TaskSettings = field(default_factory=TaskSettings)
    method: Annotated[AnyMethodSettings, Field(discriminator="name")] = field(default_factory=HacpoSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    learning: LearningSettings = field(default_factory=LearningSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    rollouts: RolloutLogSettings = field(default_factory=RolloutLogSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    collapse: CollapseSettings = field(default_factory=CollapseSettings)
    watchdog_minutes: float = 30.0  # without any movement, until the run says where it hangs; 0: never

    def __post_init__(self) -> None:
        if not self.agents:
            raise ValueError("agents: name at least one agent")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, not {self.steps}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.logged_rollouts < 0:
            raise ValueError(f"logged_rollouts must not be negative, not {self.logged_rollouts}")
        if self.watchdog_minutes < 0:
            raise ValueError(f"watchdog_minutes must not be negative, not {self.watchdog_minutes} (0: off)")
        if not self.output or "\0" in self.output:
            raise ValueError(f"output must name a folder, not {self.output!r}")

    def rollouts_per_prompt(self, agent: AgentSettings) -> int:
        """G of one agent."""
        return agent.rollouts_per_prompt or self.rollout.rollouts_per_prompt

    def engine(self, agent: AgentSettings) -> EngineName:
        """What generates one agent's responses."""
        return agent.engine or self.rollout.engine
