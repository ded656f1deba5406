"""The interface for watching a run. Watching never changes a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from hacrl.training.metrics import Accuracy, StepReport
from hacrl.types import VerifiedRollout

Phase = Literal["evaluate", "sync", "rollout", "verify", "learn", "save"]


class Observer:
    """Receives a run's events and does nothing. Subclasses override the events they use."""

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Handle the start of a phase of one agent. Step 0 is before training.

        Agents that generate concurrently start the phase when their own engine is ready.
        """

    def on_response(self, agent: str) -> None:
        """Handle the end of one response of an agent, while its other responses are still generated."""

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Handle one agent's verified rollouts; a step with `rollout.resample` may have several rounds."""

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Handle the end of a step.

        ``seconds`` has a time for each "phase/agent", and for the "whole" step in this process. Phases of
        agents that generate concurrently overlap.
        """

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Handle an evaluation of every agent after ``step`` steps."""

    def on_note(self, step: int, note: str) -> None:
        """Handle a sentence that the user should read. Step 0 is before training."""

    def on_end(self) -> None:
        """Handle the end of the run, successful or not."""


class Observers(Observer):
    """Passes every event to several observers."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def add(self, observer: Observer) -> None:
        """Pass further events to this observer, too."""
        self._observers = (*self._observers, observer)

    def remove(self, observer: Observer) -> None:
        """Pass no more events to this observer."""
        self._observers = tuple(one for one in self._observers if one is not observer)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_phase(step, phase, agent)

    def on_response(self, agent: str) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_response(agent)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_rollouts(step, agent, rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_step(report, seconds)

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_evaluation(step, accuracies)

    def on_note(self, step: int, note: str) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_note(step, note)

    def on_end(self) -> None:
        """Pass the event on."""
        for observer in self._observers:
            observer.on_end()
