"""Results that are read one pass late, so that the device that computes them never waits for their reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class ReadLater(Generic[Result]):
    """Hands each result on when the next one is on its way; the last one when :meth:`finish` says so."""

    def __init__(self, read: Callable[[Result], object]) -> None:
        self._read = read
        self._waiting: list[Result] = []

    def add(self, result: Result) -> None:
        """The device has been asked for it, and may not have it yet."""
        self.finish()
        self._waiting.append(result)

    def finish(self) -> None:
        """Read what has not been read."""
        while self._waiting:
            self._read(self._waiting.pop())
