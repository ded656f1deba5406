"""A run's settings: :class:`RunConfig` and its sections.

Every section is a frozen record in this package. The loader validates a recipe straight into them, so that a
key is defined in exactly one place. The rest of hacrl imports settings from this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from hacrl.config.agent import (
    AgentSettings,
    FsdpSettings,
    LoraSettings,
    Precision,
    ReplicaSettings,
)
from hacrl.config.asynchronous import AsynchronousSettings
from hacrl.config.endpoint import EndpointSettings
from hacrl.config.engine import MOST_MEMORY, EngineName, VllmMode, VllmSettings, WeightSync
from hacrl.config.evaluation import (
    DEFAULT_BATCH,
    DEFAULT_MAX_NEW_TOKENS,
    DEFAULT_PROBLEMS,
    BenchmarkSettings,
    EvaluationSettings,
    check_stop_strings,
)
from hacrl.config.learning import (
    FEW_TOKENS,
    MANY_TOKENS,
    STREAMING,
    WEIGHTS_LEAVE,
    LearningSettings,
    Offload,
    OffloadLevel,
    OldPolicy,
    Schedule,
    SkipZeroGradient,
)
from hacrl.config.method import (
    AnyMethodSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    NaiveSettings,
    PluginMethodSettings,
    SingleAgentSettings,
    check_schedule,
)
from hacrl.config.method_base import Aggregation, CapabilityMeasure, MethodSettings, MinibatchOrder
from hacrl.config.ray import OnLoss, PlaceSettings, RaySettings
from hacrl.config.rules import (
    AlignedSettings,
    FtisSettings,
    S2lpoSettings,
    SapoSettings,
    SuccessGatedSettings,
    XgrpoSettings,
)
from hacrl.config.settings import Settings
from hacrl.config.task import TaskSettings, VerifierSettings
from hacrl.types import Sampling

__all__ = [
    "DEFAULT_BATCH",
    "DEFAULT_MAX_NEW_TOKENS",
    "DEFAULT_PROBLEMS",
    "FEW_TOKENS",
    "MANY_TOKENS",
    "MOST_MEMORY",
    "STREAMING",
    "WEIGHTS_LEAVE",
    "AgentSettings",
    "Aggregation",
    "AlignedSettings",
    "AnyMethodSettings",
    "AsynchronousSettings",
    "BenchmarkSettings",
    "CapabilityMeasure",
    "CheckpointSettings",
    "EndpointSettings",
    "EngineName",
    "EvaluationSettings",
    "FsdpSettings",
    "FtisSettings",
    "GrpoSettings",
    "GspoSettings",
    "HacpoSettings",
    "KeepRollouts",
    "LearningSettings",
    "LoraSettings",
    "MethodSettings",
    "MinibatchOrder",
    "NaiveSettings",
    "Offload",
    "OffloadLevel",
    "OldPolicy",
    "OnLoss",
    "PlaceSettings",
    "PluginMethodSettings",
    "Precision",
    "RaySettings",
    "ReplicaSettings",
    "RolloutSettings",
    "RunConfig",
    "S2lpoSettings",
    "SapoSettings",
    "Schedule",
    "SingleAgentSettings",
    "SkipZeroGradient",
    "SuccessGatedSettings",
    "TaskSettings",
    "VerifierSettings",
    "VllmMode",
    "VllmSettings",
    "WeightSync",
    "XgrpoSettings",
    "check_schedule",
]

KeepRollouts = int | Literal["all", "none"]


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """In each step every agent gets the same prompts and responds to every prompt several times."""

    prompts_per_step: int = 16
    """Prompts of one step."""
    rollouts_per_prompt: int = 8
    """G: responses of each agent to each prompt; an agent may have its own."""
    resample: int = 0
    """Most further rounds of a step in which other prompts replace those whose responses all have the same
    reward (dynamic sampling of DAPO). 0: none."""
    max_prompt_tokens: int | None = None
    """Problems with longer prompts are left out. Default: a prompt that does not fit the model is an
    error."""
    max_new_tokens: int = 64
    """Longest response in tokens; of an episode with an environment its opening, actions and observations
    together. Default of tasks with longer answers: 512 (`gsm8k`, `boxed`), 1024 (`math`, `environment`), 256
    (`gym`)."""
    temperature: float = 1.0
    """Sampling temperature, at least 0.01."""
    top_k: int = 0
    """Sample from the so many most probable tokens; 0: from all."""
    top_p: float = 1.0
    """Nucleus sampling: share of the probability that the sampled tokens come from."""
    stop: str | tuple[str, ...] = ()
    """Texts that end a response, e.g. `["\\nQuestion:"]`, in training and evaluation, with every engine. The
    verifier sees what is before the text; learners learn to write the text."""
    engine: EngineName = "transformers"
    """What generates responses: `transformers`, `vllm`, an installed package's, or `module:attribute`; an
    agent may have its own."""
    max_batch: int = 512
    """Most responses of one agent that the transformers engine decodes side by side; halved when memory runs
    out."""

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "rollouts_per_prompt", "max_new_tokens", "max_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.resample < 0:
            raise ValueError(f"resample must not be negative, not {self.resample} (0: no further rounds)")
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
        check_stop_strings(self.stop_strings)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The texts that end a response."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of training rollouts."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.stop_strings)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Checkpoints hold all that an exact resume needs: weights, optimizers, capabilities, position."""

    every: int = 20
    """Steps between checkpoints; one more is written at the end. 0: only when a signal stops the run."""
    keep_last: int = 2
    """How many of the newest checkpoints stay. With more than one, a damaged checkpoint has a predecessor."""
    keep_best: int = 0
    """How many checkpoints stay besides those, by the best mean held-out accuracy."""
    background: bool = True
    """Whether a checkpoint is copied to the machine's memory and written while the next step runs. False:
    training waits until the checkpoint is written, and no copy is made."""

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, not {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """All that decides the outcome of a run, and where the run is written."""

    agents: tuple[AgentSettings, ...]
    """The agents. In a recipe, `agent_defaults` holds keys that every agent takes over unless it has
    its own."""
    output: str
    """The run's folder. Default on the command line: `runs/NAME` of the recipe's file."""
    steps: int = 100
    """Training steps."""
    seed: int = 0
    """Decides all randomness: equal runs on one machine give equal metrics."""
    device: str = "auto"
    """Where agents are trained: `cpu`, `cuda`, `cuda:1`. `auto`: a GPU if there is one."""
    executor: str = "local"
    """Where the agents' workers run: `local` (this process), `ray` (a cluster), an installed package's, or
    `module:function`."""
    ray: RaySettings = field(default_factory=RaySettings)
    """The cluster of `executor: ray`."""
    threads: int | None = None
    """CPU threads of torch. Default: torch's own choice, which the run writes into its config."""
    trackers: tuple[str, ...] = ()
    """Where metrics also go: `tensorboard`, `wandb`, `trackio`, `mlflow`, or your own. A run's name there is
    its folder's."""
    project: str = "hacrl"
    """The trackers' project."""
    logged_rollouts: int = 4
    """Responses per agent and step in the trackers' tables; 0: none."""
    keep_rollouts: KeepRollouts = "all"
    """Steps whose rollouts stay in `RUN/rollouts`: `all`, `none`, or the last so many. Steps that a resumed
    run would need always stay."""
    pause_collapsed: bool = False
    """Whether an agent that has collapsed (20 steps without a reward, a text or a stop token) is paused. A
    note names it in any case."""
    task: TaskSettings = field(default_factory=TaskSettings)
    """The problems and their verification; `task: gsm8k` is short for `task: {name: gsm8k}`."""
    method: AnyMethodSettings = field(default_factory=HacpoSettings)
    """The method; `method: gspo` is short for `method: {name: gspo}`."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Prompts of a step, and how responses are sampled."""
    learning: LearningSettings = field(default_factory=LearningSettings)
    """Optimizer, updates, memory."""
    asynchronous: AsynchronousSettings = field(default_factory=AsynchronousSettings)
    """Whether agents sample while they learn."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Accuracy on held-out problems."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """How often the run's state is saved, and what stays of it."""

    def __post_init__(self) -> None:
        if not self.agents:
            raise ValueError("agents: name at least one agent")
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, not {self.steps}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        if self.logged_rollouts < 0:
            raise ValueError(f"logged_rollouts must not be negative, not {self.logged_rollouts}")
        if isinstance(self.keep_rollouts, int) and self.keep_rollouts < 1:
            raise ValueError(
                "keep_rollouts must be all, none or a number of steps of at least 1, "
                f"not {self.keep_rollouts}"
            )
        if not self.output or "\0" in self.output:
            raise ValueError(f"output must name a folder, not {self.output!r}")
        frozen = self.method.frozen_agents  # the method decides this as well as the agents' own keys
        agents = (replace(one, frozen=True) if one.name in frozen else one for one in self.agents)
        object.__setattr__(self, "agents", tuple(agents))

    @property
    def learners(self) -> list[AgentSettings]:
        """The agents that are trained: all but the frozen ones."""
        return [agent for agent in self.agents if not agent.frozen]

    @property
    def local_agents(self) -> list[AgentSettings]:
        """The agents whose models hacrl loads: all but those with an endpoint."""
        return [agent for agent in self.agents if agent.endpoint is None]

    def rollouts_per_prompt(self, agent: AgentSettings) -> int:
        """Return G of one agent."""
        return agent.rollouts_per_prompt or self.rollout.rollouts_per_prompt

    def engine(self, agent: AgentSettings) -> EngineName:
        """Return the name of the engine that generates one agent's responses."""
        return agent.engine or self.rollout.engine
