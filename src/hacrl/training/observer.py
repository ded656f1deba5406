"""Who may watch a run. Watching never changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from hacrl.training.accuracy import Accuracy
from hacrl.training.metrics import StepReport
from hacrl.types import VerifiedRollout

Phase = Literal["evaluate", "sync", "rollout", "verify", "learn", "save"]


class Observer:
    """Does nothing; subclasses override what they care about."""

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Work of one kind begins for one agent. Step 0 is before training.

        Agents that answer side by side begin when each one's engine is ready.
        """

    def on_response(self, agent: str) -> None:
        """One response of an agent has ended; others are still under way."""

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """All of one agent's verified rollouts of a step."""

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """A step is done; ``seconds`` by "phase/agent", and of the "whole" step in this process.

        Phases of agents that answer side by side overlap.
        """

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Every agent was evaluated after ``step`` steps."""

    def on_note(self, step: int, note: str) -> None:
        """Something the user should know, in a sentence. Step 0 is before training."""

    def on_end(self) -> None:
        """The run is over, whatever its outcome."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_phase(step, phase, agent)

    def on_response(self, agent: str) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_response(agent)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_rollouts(step, agent, rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_step(report, seconds)

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_evaluation(step, accuracies)

    def on_note(self, step: int, note: str) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_note(step, note)

    def on_end(self) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_end()
