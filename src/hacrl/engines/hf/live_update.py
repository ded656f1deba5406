"""Replace an engine's weights while it generates: between two tokens, in agreement of two threads.

The thread that updates announces an update and waits until the thread that generates has come to the end of
a token. That thread then waits until the update is made. Without a generation, an update is made at once.
No wait is longer than a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from hacrl.engines.sync_check import EngineError
from hacrl.types import VersionSpans, merged_spans

UPDATE_SECONDS = 600.0  # until the end of a token, or until an update is made


class Cancelled(Exception):  # noqa: N818 - not an error
    """Nobody needs the generation's samples any more."""


class LiveUpdate:
    """Which policy version an engine's weights are, and the meeting of the two threads.

    ``name`` is the engine's, for messages.
    """

    def __init__(self, name: str, version: int, limit: float = UPDATE_SECONDS) -> None:
        self.version = version
        self.steps = 0  # of generations, to tell whether one goes on
        self._name = name
        self._limit = limit
        self._one_update = threading.Lock()
        self._changed = threading.Condition()  # guards the three attributes below
        self._is_announced = False
        self._is_generating = False
        self._is_cancelled = False
        self._is_parked = False  # the thread that generates waits for the update

    @property
    def is_announced(self) -> bool:
        """Whether an update waits for the end of the present token."""
        return self._is_announced

    @property
    def is_generating(self) -> bool:
        """Whether a generation is under way."""
        return self._is_generating

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Within the block, updates wait for :meth:`end_of_token`. One generation at a time."""
        with self._changed:
            self._wait(lambda: not self._is_announced, "its weights were not updated")
            if self._is_generating:
                raise EngineError(f"{self._name} generates already; it serves one request at a time")
            self._is_generating = True
        try:
            yield
        finally:
            with self._changed:
                self._is_generating = self._is_cancelled = False
                self._changed.notify_all()

    def cancel(self) -> None:
        """Let the generation under way end with :class:`Cancelled` after its present token."""
        with self._changed:
            self._is_cancelled = self._is_generating

    def count_step(self) -> None:
        """Count a step of the generation; raise :class:`Cancelled` if nobody needs it any more."""
        self.steps += 1
        if self._is_cancelled:
            raise Cancelled

    def end_of_token(self) -> None:
        """Let an announced update be made. The thread that generates calls this between two tokens."""
        if not self._is_announced:
            return
        with self._changed:
            self._is_parked = True
            self._changed.notify_all()
            try:
                self._wait(lambda: not self._is_announced, "its weights were not updated")
            finally:
                self._is_parked = False

    @contextmanager
    def update(self) -> Iterator[None]:
        """Within the block no token is sampled, and the weights may change. Set :attr:`version` there."""
        with self._one_update:
            try:
                with self._changed:
                    self._is_announced = True
                    self._wait(
                        lambda: self._is_parked or not self._is_generating, "it did not finish its token"
                    )
                yield
            finally:
                with self._changed:
                    self._is_announced = False
                    self._changed.notify_all()

    def _wait(self, is_done: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(is_done, self._limit):
            raise EngineError(f"{self._name} cannot go on: {what} within {self._limit:g} s")


def spans_of_tokens(versions: Iterable[int]) -> VersionSpans:
    """Return the spans of a response from the version that sampled each of its tokens."""
    return merged_spans((version, 1) for version in versions)
