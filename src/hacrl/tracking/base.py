"""What a tracker is: one small protocol per tool, and one observer that drives any of them."""

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
    """What a tracker is told of a run before it begins."""

    folder: Path
    project: str
    name: str
    config: Mapping[str, Any]  # resolved, JSON-ready
    config_yaml: str
    agents: tuple[str, ...]
    logged_rollouts: int


class Backend(ABC):
    """One tool. Only its own file knows its API; the tool itself is imported when one is made."""

    @abstractmethod
    def start(self, run: TrackedRun) -> None:
        """Open a run and write its config down. The run's folder is there."""

    @abstractmethod
    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Numbers of one step. Called again for the same step with other names."""

    @abstractmethod
    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """A few rollouts of one step, of all agents."""

    @abstractmethod
    def finish(self, succeeded: bool) -> None:
        """Send what is left and close the run."""


class Tracker(Observer):
    """Passes what happens on to one tool.

    The tool is started by the first event: then all models have loaded and the run's folder exists. A tool
    that cannot start is an error, because the run has hardly begun and somebody asked for it. After that
    nothing a tool does may cost the run: hours of training are worth more than their copy in a tracker, and
    the run's folder has all of it anyway. So any exception is reported once and switches the tracker off.
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
        """The first one starts the tool; a run whose agents all came to be saved has succeeded."""
        self._start()
        if phase == "save":
            self._unsaved.discard(agent)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Keep a few until the step is done: they go out as one table."""
        self._start()
        self._rows += sample_rows(step, agent, rollouts, self._run.logged_rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """All numbers of the step, and the rollouts kept."""
        self._start()
        rows, self._rows = self._rows, []
        self._try(lambda: self._backend.log_scalars(report.step, step_scalars(report, seconds)))
        if rows:
            self._try(lambda: self._backend.log_rollouts(report.step, rows))

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """All accuracies."""
        self._start()
        self._try(lambda: self._backend.log_scalars(step, evaluation_scalars(accuracies)))

    def on_end(self) -> None:
        """Close the tool's run. What comes later is not tracked any more."""
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
                f"correct that, or leave {self._name} out of trackers"
            ) from error
        self._started = True

    def _try(self, action: Callable[[], None]) -> None:
        """Do it unless the tracker is off. Swallows whatever the tool raises: see the class."""
        if self._off:
            return
        try:
            action()
        except Exception as error:
            self._off = True
            print(
                f"hacrl: tracker {self._name} failed and is off for the rest of this run "
                f"({type(error).__name__}: {printable(str(error))}); the run goes on and is kept in "
                f"{self._run.folder}",
                file=sys.stderr,
                flush=True,
            )
