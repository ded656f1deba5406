"""What a check of a step's report sees, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.training.metrics import AgentReport, StepReport


@dataclass(frozen=True)
class StepView:
    """One step's report, and what a check needs to judge it."""

    report: StepReport
    config: RunConfig
    # agent -> entropy of its responses in the first step that has one
    first_entropy: dict[str, float] = field(default_factory=dict)

    @property
    def agents(self) -> dict[str, AgentReport]:
        """The agents that took part in the step."""
        return self.report.agents

    def settings(self, name: str) -> AgentSettings:
        """Return an agent's own settings."""
        return next(agent for agent in self.config.agents if agent.name == name)

    def learning_rate(self, name: str) -> float:
        """Return an agent's full learning rate, before warm-up and schedule."""
        return self.settings(name).lr or self.config.learning.lr


@dataclass(frozen=True)
class Symptom:
    """What is wrong with one agent, or with what it learns from one partner."""

    agent: str
    note: str  # the number, the likely cause and the fix
    partner: str = ""


@dataclass(frozen=True)
class Check:
    """A symptom by name, how to find it in a step, and in how many steps in a row it must be there."""

    name: str
    find: Callable[[StepView], Iterator[Symptom]]
    steps: int = 1
