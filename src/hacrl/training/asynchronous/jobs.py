"""Run the jobs of an asynchronous run in threads; everything else stays in the thread that starts them.

A lane has a thread of its own, which lives as long as the run: torch keeps a team of CPU threads for every
thread that has computed. What a job tells observers is queued, and handled by the thread that waits in
:meth:`LaneThreads.next`. So observers, the rollout log and the state of the run need no locks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hacrl.training.asynchronous.schedule import Job
from hacrl.training.observer import Observer, Phase

Action = Callable[[], None]
Post = Callable[[Action], None]
Work = Callable[[Observer], Any]

ABANDON_SECONDS = 10.0  # time for the other jobs to end after one has failed


@dataclass(frozen=True)
class Ended:
    """A job that has ended: with a result, or with an error."""

    job: Job
    result: Any = None
    error: BaseException | None = None


class Jobs(Protocol):
    """Runs jobs at the same time as each other."""

    def start(self, job: Job, work: Work) -> None:
        """Begin a job. ``work`` gets the observer that it reports to."""
        ...

    def next(self, seconds: float) -> Ended | None:
        """Return the next job that ends, or None after so many seconds. Handle what jobs report meanwhile."""
        ...

    def close(self) -> list[Ended]:
        """Wait a limited time for the jobs under way; return those that have ended. None starts any more."""
        ...

    @property
    def running(self) -> list[Job]:
        """The jobs that have not ended."""
        ...


class QueuedEvents(Observer):
    """Passes what a job reports to the run's observers, in the thread that waits for the jobs."""

    def __init__(self, observer: Observer, post: Post) -> None:
        self._observer = observer
        self._post = post

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Queue the event."""
        self._post(partial(self._observer.on_phase, step, phase, agent))

    def on_response(self, agent: str) -> None:
        """Queue the event."""
        self._post(partial(self._observer.on_response, agent))

    def on_note(self, step: int, note: str) -> None:
        """Queue the event."""
        self._post(partial(self._observer.on_note, step, note))


class LaneThreads:
    """Runs every lane's jobs in a thread of its own."""

    def __init__(self, observer: Observer) -> None:
        self._events = QueuedEvents(observer, self._post)
        self._queue: queue.SimpleQueue[Action | Ended] = queue.SimpleQueue()
        self._lanes: dict[str, queue.SimpleQueue[tuple[Job, Work] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._running: dict[Job, None] = {}  # an ordered set
        self._is_closed = False

    def start(self, job: Job, work: Work) -> None:
        """Queue the job in its lane, which is idle."""
        lane = f"{'engine' if job.uses_engine else 'learner'}-{job.agent}"
        if lane not in self._lanes:
            self._lanes[lane] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._run, args=(self._lanes[lane],), name=f"hacrl-{lane}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self._running[job] = None
        self._lanes[lane].put((job, work))

    def next(self, seconds: float) -> Ended | None:
        """See :class:`Jobs`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            if isinstance(item, Ended):
                del self._running[item.job]
                return item
            item()

    def close(self) -> list[Ended]:
        """End all threads; those whose job does not end in time are left behind."""
        self._is_closed = True
        for lane in self._lanes.values():
            lane.put(None)
        deadline = time.monotonic() + ABANDON_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = []
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if isinstance(item, Ended):
                    del self._running[item.job]
                    ended.append(item)
        return ended

    @property
    def running(self) -> list[Job]:
        """The jobs that have not ended."""
        return list(self._running)

    def _post(self, action: Action) -> None:
        if not self._is_closed:
            self._queue.put(action)

    def _run(self, lane: queue.SimpleQueue[tuple[Job, Work] | None]) -> None:
        while (item := lane.get()) is not None:
            job, work = item
            try:
                self._queue.put(Ended(job, work(self._events)))
            except BaseException as error:  # raised again in the thread that waits
                self._queue.put(Ended(job, error=error))
