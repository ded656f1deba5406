"""A run, as its user describes it. Each section is defined in the layer that uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from hacrl.agents.engine_settings import EngineName
from hacrl.agents.settings import AgentSettings
from hacrl.algorithms.settings import AnyMethodSettings, HacpoSettings
from hacrl.checkpoint.settings import CheckpointSettings
from hacrl.evaluation.settings import EvaluationSettings
from hacrl.learning.collapse_settings import CollapseSettings
from hacrl.learning.settings import LearningSettings
from hacrl.rollout.settings import RolloutSettings
from hacrl.rollouts.settings import RolloutLogSettings
from hacrl.tasks.settings import TaskSettings


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the outcome of a run, and where it is written."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by pydantic

    agents: tuple[AgentSettings, ...]
    output: str  # folder of this run
    steps: int = 100
    seed: int = 0
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": a GPU if there is one
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
