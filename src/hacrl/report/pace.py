"""How fast a run goes, and so how long it will take."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

_LAST_STEPS = 10  # the median of so many: one evaluation or restart among them does not count, a trend does


class Pace:
    """Counts steps, and the time from the end of one to the end of the next, all between them included."""

    def __init__(self, steps: int, done: int, clock: Callable[[], float]) -> None:
        self.steps = steps
        self.done = done
        self._clock = clock
        self._mark: float | None = None  # when the step under way began: when the last one ended
        self._lasted: deque[float] = deque(maxlen=_LAST_STEPS)

    def step_begins(self) -> None:
        """Work on a step is under way. Only the first of a process counts: others begin where one ended."""
        if self._mark is None:
            self._mark = self._clock()

    def step_ends(self, step: int, seconds: float) -> None:
        """A step is done; ``seconds`` counts if nobody said when it began."""
        now = self._clock()
        self._lasted.append(seconds if self._mark is None else now - self._mark)
        self._mark, self.done = now, step

    @property
    def left(self) -> float | None:
        """Seconds until the last step is done; None before there is a step to judge by."""
        if not self._lasted:
            return None
        one = statistics.median(self._lasted)
        under_way = 0.0 if self._mark is None else min(one, self._clock() - self._mark)
        return max(0.0, one * (self.steps - self.done) - under_way)


def duration(seconds: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``; days as ``2.5 days``."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours >= 48:
        return f"{seconds / 86400:.1f} days"
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
