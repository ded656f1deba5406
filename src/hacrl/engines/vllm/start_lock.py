"""Engines that start one at a time or side by side, and others that wait until all have.

Unless it was told how large its cache is, an engine measures how much of a GPU's memory is free when it
starts. What others take or give back meanwhile would count as its own, so it starts alone: the next one may
when it has its first weights, and nobody answers before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK_SECONDS = 0.2  # between looks at whether it is still worth waiting


class Starts:
    """Who starts, and who is about to."""

    def __init__(self) -> None:
        self._due = 0
        self._starting, self._is_alone = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, alone: bool) -> Iterator[None]:
        """Within the block one may start: ``alone``, or beside others that need not be."""

        def may_start() -> bool:
            return not self._is_alone and not (alone and self._starting)

        with self._changed:
            self._changed.wait_for(may_start)
            self._starting, self._is_alone = self._starting + 1, alone
        try:
            yield
        finally:
            with self._changed:
                self._starting, self._is_alone = self._starting - 1, False
                self._changed.notify_all()

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
