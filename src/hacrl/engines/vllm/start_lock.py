"""Order the starts of engines in one process: exclusive starts, shared starts, and waiting for all.

Unless its cache has a fixed size, an engine measures the free memory of a GPU when it starts. Memory that
others take or free meanwhile would count as its own, so such an engine starts exclusively. The next engine
starts once this one has its first weights, and no engine generates before all have started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

CHECK_SECONDS = 0.2  # between calls of the caller's check


class StartLock:
    """Counts the engines that start now, and those that are about to start."""

    def __init__(self) -> None:
        self._announced = 0
        self._starting, self._is_exclusive = 0, False
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, exclusive: bool) -> Iterator[None]:
        """Start an engine within the block: ``exclusive``, or beside others that need not be."""

        def may_start() -> bool:
            return not self._is_exclusive and not (exclusive and self._starting)

        with self._changed:
            self._changed.wait_for(may_start)
            self._starting, self._is_exclusive = self._starting + 1, exclusive
        try:
            yield
        finally:
            with self._changed:
                self._starting, self._is_exclusive = self._starting - 1, False
                self._changed.notify_all()

    @contextmanager
    def announce(self) -> Iterator[None]:
        """Announce that an engine starts within the block, now or after waiting."""
        with self._changed:
            self._announced += 1
        try:
            yield
        finally:
            with self._changed:
                self._announced -= 1
                self._changed.notify_all()

    def wait_for_all(self, check: Callable[[], None]) -> None:
        """Return when no start is announced; ``check`` may raise to stop the waiting."""
        with self._changed:
            while not self._changed.wait_for(lambda: not self._announced, CHECK_SECONDS):
                check()
