"""How fast responses of different lengths could be generated if all lengths were known in advance."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Decode steps in a row that are made for the same number of responses."""

    running: int
    steps: int


class StepTimes:
    """Seconds of a decode step, measured at a few batch sizes; straight lines between them."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._sizes = sorted(measured)
        self._seconds = [measured[size] for size in self._sizes]

    def at(self, size: int) -> float:
        """Of a batch of this size; beyond the largest measured one in proportion to it."""
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return self._seconds[-1] * size / self._sizes[-1]
        if place == 0 or self._sizes[place] == size:
            return self._seconds[place]
        (low, high), (below, above) = self._sizes[place - 1 : place + 1], self._seconds[place - 1 : place + 1]
        return below + (above - below) * (size - low) / (high - low)


def longest_first(lengths: Sequence[int], slots: int) -> list[Stretch]:
    """The schedule that starts the longest response that waits whenever a slot is free.

    Slots are full as long as there is work for them, and the last to end are short ones.
    """
    waiting = sorted((length for length in lengths if length), reverse=True)
    running = waiting[:slots]  # steps at which each of them ends
    heapq.heapify(running)
    next_up, now = slots, 0
    stretches: list[Stretch] = []
    while running:
        size, end = len(running), running[0]
        if end > now:
            stretches.append(Stretch(size, end - now))
            now = end
        if next_up < len(waiting):
            heapq.heapreplace(running, now + waiting[next_up])
            next_up += 1
        else:
            heapq.heappop(running)
    return stretches


def in_batches(lengths: Sequence[int], slots: int) -> list[Stretch]:
    """What a plain loop does: a batch lasts until its longest response has ended, then comes the next."""
    batches = [lengths[start : start + slots] for start in range(0, len(lengths), slots)]
    return [Stretch(len(batch), max(batch)) for batch in batches]


def seconds_of(stretches: Sequence[Stretch], times: StepTimes) -> float:
    """How long a schedule takes."""
    return sum(stretch.steps * times.at(stretch.running) for stretch in stretches)
