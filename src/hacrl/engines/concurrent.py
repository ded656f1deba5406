"""Run jobs of several engines concurrently; callbacks to observers run in the calling thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Action = Callable[[], None]

ABANDON_SECONDS = 10.0  # time for the other jobs to stop after one has failed


class MainThread(Protocol):
    """Lets a job run something in the thread that waits for all jobs."""

    def post(self, action: Action) -> None:
        """Queue ``action`` to run there. Raise :class:`Abandoned` if the thread does not wait any more."""
        ...

    def call(self, action: Action) -> None:
        """Run ``action`` there, and return when it has finished."""
        ...


class Abandoned(Exception):  # noqa: N818 - not an error
    """The job's result is not needed any more: another job, or the thread that waits, has failed."""


class DirectCalls:
    """The main thread as seen by a job that runs in it."""

    def post(self, action: Action) -> None:
        """Run the action."""
        action()

    def call(self, action: Action) -> None:
        """Run the action."""
        action()


class _Mailbox:
    """Sends one job's actions to the main thread."""

    def __init__(self, actions: queue.SimpleQueue[Action], is_abandoned: threading.Event) -> None:
        self._actions = actions
        self._is_abandoned = is_abandoned
        self._has_run: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def post(self, action: Action) -> None:
        if self._is_abandoned.is_set():
            raise Abandoned
        self._actions.put(action)

    def call(self, action: Action) -> None:
        self.post(action)
        self._actions.put(lambda: self._has_run.put(True))
        if not self._has_run.get():
            raise Abandoned

    def abandon(self) -> None:
        self._has_run.put(False)


def run_concurrently(jobs: Mapping[str, Callable[[MainThread], Result]]) -> dict[str, Result]:
    """Run every job in a thread of its own and return their results by name.

    A single job runs in the calling thread. If a job or one of its actions fails, the others are abandoned:
    they stop at their next :meth:`MainThread.post` or :meth:`MainThread.call`.
    """
    if len(jobs) == 1:
        ((name, job),) = jobs.items()
        return {name: job(DirectCalls())}
    actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
    results: dict[str, Result] = {}
    errors: dict[str, BaseException] = {}
    is_abandoned = threading.Event()
    mailboxes = {name: _Mailbox(actions, is_abandoned) for name in jobs}

    def run(name: str, job: Callable[[MainThread], Result]) -> None:
        try:
            result = job(mailboxes[name])
            actions.put(lambda: results.__setitem__(name, result))
        except Abandoned:
            pass
        except BaseException as error:
            errors[name] = error
            actions.put(lambda: _raise(errors[name]))

    threads = [
        threading.Thread(target=run, args=(name, job), name=f"hacrl-generate-{name}", daemon=True)
        for name, job in jobs.items()
    ]
    try:
        for thread in threads:
            thread.start()
        while len(results) < len(jobs):
            actions.get()()
    except BaseException as error:
        is_abandoned.set()
        for mailbox in mailboxes.values():
            mailbox.abandon()
        deadline = time.monotonic() + ABANDON_SECONDS
        for thread in threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))
        for name, other in list(errors.items()):
            if other is not error:
                error.add_note(f"The engine of agent {name!r} failed, too: {other}")
        raise
    return {name: results[name] for name in jobs}


def _raise(error: BaseException) -> None:
    raise error
