"""Engines that start one at a time, and others that wait until all have.

An engine measures how much of a GPU's memory is free when it starts. What others take or give back meanwhile
would count as its own, so the next one starts when it has its first weights, and nobody answers before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_SECONDS = 0.2  # between looks at whether it is still worth waiting


class Starts:
    """Who starts, and who is about to."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._due = 0
        self._changed = threading.Condition()

    @contextmanager
    def due(self) -> Iterator[None]:
        """Within the block somebody is about to start, or does."""
        with self._changed:
            self._due += 1
        try:
            yield
        finally:
            with self._changed:
                self._due -= 1
                self._changed.notify_all()

    def wait(self, check: Callable[[], None]) -> None:
        """Return when nobody is; ``check`` may raise to leave earlier."""
        with self._changed:
            while not self._changed.wait_for(lambda: not self._due, LOOK_SECONDS):
                check()
