"""The interface of a tracking tool, and the observer that sends a run's events to any such tool."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import ConfigError
from hacrl.plain_text import printable
from hacrl.tracking.samples import RolloutRow, sample_rows
from hacrl.tracking.scalars import Scalars, evaluation_scalars, step_scalars
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout


@dataclass(frozen=True)
class TrackedRun:
    """A run, as trackers see it before it starts."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]  # resolved, JSON-ready
    config_yaml: str
    agents: tuple[str, ...]
    logged_rollouts: int  # per agent and step


class Backend(ABC):
    """One tracking tool. Its package is imported only when the backend is made."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Open a run in the tool and write its config. The run's folder exists."""

    @abstractmethod
    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Log numbers of one step. Called again for the same step with other names."""

    @abstractmethod
    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Log a few rollouts of one step, of all agents."""

    def log_note(self, step: int, note: str) -> None:  # noqa: B027 - optional
        """Log a sentence that the user should read; by default nowhere, because the run's folder has it."""

    @abstractmethod
    def finish(self, succeeded: bool) -> None:
        """Send all remaining data and close the run."""


class Tracker(Observer):
    """Sends a run's events to one tool.

    The first event starts the tool: by then all models have loaded and the run's folder exists. A tool that
    cannot start is an error. Later a failing tool must not stop the run, whose folder holds all data anyway:
    the first exception is reported and switches the tracker off.
    """

    def __init__(self, name: str, backend: Backend, run: TrackedRun) -> None:
        self._name = name
        self._backend = backend
        self._run = run
        self._started = False
        self._off = False
        self._rows: list[RolloutRow] = []
        self._unsaved = set(run.agents)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Start the tool with the first phase. A run has succeeded when it has saved all agents."""
        self._start()
        if phase == "save":
            self._unsaved.discard(agent)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Keep a few rollouts until the end of the step, when they are logged as one table."""
        self._start()
        if all(row.agent != agent for row in self._rows):  # else of a further round of the step
            self._rows += sample_rows(step, agent, rollouts, self._run.logged_rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Log all numbers of the step, and the kept rollouts."""
        self._start()
        rows, self._rows = self._rows, []
        self._try(lambda: self._backend.log_scalars(report.step, step_scalars(report, seconds)))
        if rows:
            self._try(lambda: self._backend.log_rollouts(report.step, rows))

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Log all accuracies."""
        self._start()
        self._try(lambda: self._backend.log_scalars(step, evaluation_scalars(accuracies)))

    def on_note(self, step: int, note: str) -> None:
        """Log a note."""
        self._start()
        self._try(lambda: self._backend.log_note(step, note))

    def on_end(self) -> None:
        """Close the tool's run. Later events are ignored."""
        if self._started:
            self._try(lambda: self._backend.finish(succeeded=not self._unsaved))
        self._off = True

    def _start(self) -> None:
        if self._started or self._off:
            return
        try:
            self._backend.start(self._run)
        except Exception as error:
            self._off = True
            raise ConfigError(
                f"trackers: {self._name} could not start: {type(error).__name__}: {error}; "
                f"fix this, or leave {self._name} out of trackers"
            ) from error
        self._started = True

    def _try(self, action: Callable[[], None]) -> None:
        """Call the tool unless the tracker is off; report any exception and switch the tracker off."""
        if self._off:
            return
        try:
            action()
        except Exception as error:
            self._off = True
            print(
                f"hacrl: tracker {self._name} failed and is off for the rest of this run "
                f"({type(error).__name__}: {printable(str(error))}); the run continues, and its data is in "
                f"{self._run.folder}",
                file=sys.stderr,
                flush=True,
            )
