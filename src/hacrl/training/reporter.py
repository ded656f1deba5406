"""Tell observers what a run is doing: phases with their times, finished responses, notes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from hacrl.engines.concurrent import DirectCalls, MainThread
from hacrl.training.observer import Observer, Phase


class TrainingInterrupted(Exception):  # noqa: N818 - not an error
    """Training has stopped between two phases after a request; its state can be saved and resumed."""


class Reporter:
    """Announces and times the phases of a step, and stops the run between two phases on request."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.seconds: dict[str, float] = {}  # of the step under way, by "phase/agent"
        self.step = 0  # that phases and notes belong to; 0: before training
        self._began = 0.0
        self._is_interrupted = False
        self._is_generating = False  # then the run does not stop until the responses are verified
        self._generating_blocks = 0  # that are open
        self._lock = threading.Lock()  # of the two attributes above

    def begin_step(self, step: int) -> None:
        """Start timing a step."""
        self.step, self.seconds, self._began = step, {}, time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """Return the seconds by "phase/agent", and of the "whole" step."""
        self.seconds["whole"] = time.perf_counter() - self._began
        return dict(self.seconds)

    def interrupt(self) -> None:
        """Raise :class:`TrainingInterrupted` after the phase under way. May be called by a signal."""
        self._is_interrupted = True

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within the block, do not interrupt once an agent has begun to generate. Blocks may be nested."""
        with self._lock:
            self._generating_blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._generating_blocks -= 1
                self._is_generating &= self._generating_blocks > 0

    def check_interrupted(self) -> None:
        """Raise :class:`TrainingInterrupted` if an interruption was requested and no agent generates."""
        if self._is_interrupted and not self._is_generating:
            raise TrainingInterrupted

    def agent(self, name: str, main: MainThread | None = None) -> AgentReporter:
        """Return what one agent reports to; from another thread through ``main``."""
        return AgentReporter(self, name, main or DirectCalls())

    def notes(self, notes: Iterable[str]) -> None:
        """Pass on sentences for the user."""
        for note in notes:
            self.observer.on_note(self.step, note)

    def _begin_phase(self, phase: Phase, agent: str) -> None:
        self.check_interrupted()
        if phase in ("rollout", "evaluate"):
            with self._lock:
                self._is_generating = self._generating_blocks > 0
        self.observer.on_phase(self.step, phase, agent)


class AgentReporter:
    """One agent's side of a :class:`Reporter`. May be used in another thread."""

    def __init__(self, reporter: Reporter, agent: str, main: MainThread) -> None:
        self._reporter = reporter
        self._agent = agent
        self._main = main

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Announce a phase, then time the block. May raise :class:`TrainingInterrupted` before the block."""
        self._main.call(partial(self._reporter._begin_phase, phase, self._agent))
        start = time.perf_counter()
        yield
        # a phase may come several times in a step
        seconds, key = self._reporter.seconds, f"{phase}/{self._agent}"
        seconds[key] = seconds.get(key, 0.0) + time.perf_counter() - start

    def generating(self) -> AbstractContextManager[None]:
        """Return a block that is not interrupted between its generation and its verification."""
        return self._reporter.generating()

    def responses(self, count: int) -> None:
        """Report further responses that have finished."""
        for _ in range(count):
            self._main.post(partial(self._reporter.observer.on_response, self._agent))
