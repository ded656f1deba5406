"""A small kernel for discrete events, and an engine with continuous batching that runs on it.

A process is a generator. It yields ``(condition, deadline)`` and goes on when the condition is notified or
the deadline has come, whichever is first; it looks itself which of the two it was.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from cluster_costs import Times


class Condition:
    """Something that processes wait for."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []


Wait = tuple[Condition | None, float]
Process = Generator[Wait, None, None]


@dataclass(eq=False)
class Waiting:
    """A process that waits; it is resumed once."""

    process: Process
    is_done: bool = False


class Clock:
    """Run processes in the order of time; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Waiting]] = []
        self._count = itertools.count()

    def start(self, process: Process) -> None:
        """Run a process from the present time on."""
        self._push(self.now, Waiting(process))

    def notify(self, condition: Condition) -> None:
        """Resume all that wait for the condition, at the present time."""
        waiting, condition.waiting = condition.waiting, []
        for one in waiting:
            if not one.is_done:
                self._push(self.now, one)

    def run(self) -> None:
        """Run until nothing waits for a time any more."""
        while self._events:
            time, _, waiting = heapq.heappop(self._events)
            if waiting.is_done:
                continue
            waiting.is_done = True
            self.now = time
            try:
                condition, deadline = next(waiting.process)
            except StopIteration:
                continue
            again = Waiting(waiting.process)
            if condition is not None:
                condition.waiting.append(again)
            if deadline < math.inf:
                self._push(max(deadline, time), again)

    def _push(self, time: float, waiting: Waiting) -> None:
        heapq.heappush(self._events, (time, next(self._count), waiting))


class Queue:
    """A place where one does its work at a time, first come, first served: the driver, a shared GPU."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._changed = clock, Condition()
        self._line: deque[object] = deque()
        self.busy = 0.0

    def use(self, seconds: float) -> Process:
        """Wait for the turn, and take so long."""
        yield from self.enter()
        self.busy += seconds
        yield None, self._clock.now + seconds
        self.leave()

    def enter(self) -> Process:
        """Wait for the turn; it lasts until :meth:`leave`."""
        ticket = object()
        self._line.append(ticket)
        while self._line[0] is not ticket:
            yield self._changed, math.inf

    def leave(self) -> None:
        """Give the turn to the next."""
        self._line.popleft()
        self._clock.notify(self._changed)


@dataclass(eq=False)
class Batch:
    """The responses of one agent in one step; ``left`` of them have not ended."""

    step: int
    left: int
    ends: list[float] = field(default_factory=list)  # seconds at which responses ended
    is_sampled: Condition = field(default_factory=Condition)


class Decoding:
    """What one engine is computing: up to ``slots`` responses side by side, the others wait in line.

    A decode step of r responses with c tokens of context in all takes
    ``decode + max(read_weights, r per_response) + c per_context`` seconds. Between two ends r is constant and
    c grows by r a step, so d steps take ``d (a + b (c + r d / 2))``: steps are not simulated one by one.
    """

    def __init__(self, times: Times, slots: int, prompt_tokens: int) -> None:
        self.times, self.slots, self.prompt_tokens = times, slots, prompt_tokens
        self.now = 0.0
        self.ended: list[tuple[float, Batch]] = []
        self._steps = 0.0  # decode steps made
        self._context = 0.0  # tokens in the KV cache
        self._running: list[tuple[float, int, int, Batch]] = []  # step of its end, a number, length
        self._waiting: deque[tuple[int, Batch]] = deque()
        self._left: dict[Batch, int] = {}
        self._number = 0  # orders responses that end at the same step

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to decode."""
        return not self._running

    def copy(self) -> Decoding:
        """Return a copy that may be advanced alone."""
        other = Decoding(self.times, self.slots, self.prompt_tokens)
        other.now, other.ended, other._steps = self.now, list(self.ended), self._steps
        other._context, other._number = self._context, self._number
        other._running, other._waiting = list(self._running), self._waiting.copy()
        other._left = dict(self._left)
        return other

    def add(self, batch: Batch, lengths: Sequence[int]) -> None:
        """Put responses in line."""
        self._waiting.extend((length, batch) for length in lengths)
        self._left[batch] = self._left.get(batch, 0) + len(lengths)
        self._admit()

    def advance(self, until: float, stop_at_batch: bool = False) -> None:
        """Decode until this time, or until the last response of a batch has ended."""
        times, running = self.times, self._running
        while running and self.now < until:
            count = len(running)
            last = running[0][0]
            a = times.decode + max(times.read_weights, count * times.per_response)
            a += times.per_context * self._context
            b = times.per_context * count / 2
            steps = last - self._steps
            seconds = steps * (a + b * steps)
            if self.now + seconds > until:
                steps = _steps_within(until - self.now, a, b)
                self._steps, self._context = self._steps + steps, self._context + steps * count
                break
            self.now += seconds
            self._steps, self._context = last, self._context + steps * count
            is_batch_done = False
            while running and running[0][0] <= last:
                _, _, length, batch = heapq.heappop(running)
                self._context -= self.prompt_tokens + length
                self.ended.append((self.now, batch))
                self._left[batch] -= 1
                if not self._left[batch]:
                    del self._left[batch]
                    is_batch_done = True
            self._admit()
            if is_batch_done and stop_at_batch:
                return
        if until < math.inf:
            self.now = max(self.now, until)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            length, batch = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._running, (self._steps + length, self._number, length, batch))
            self._context += self.prompt_tokens


def _steps_within(seconds: float, a: float, b: float) -> float:
    """Return d of ``d (a + b d) = seconds``."""
    return 2 * seconds / (a + math.sqrt(a * a + 4 * b * seconds))


class Engine:
    """Decoding on the clock. Between two arrivals the engine looks ahead to the end of the next batch."""

    def __init__(self, decoding: Decoding, clock: Clock) -> None:
        self._decoding, self._clock = decoding, clock
        self._changed, self._changes = Condition(), 0
        clock.start(self._run())

    def submit(self, batch: Batch, lengths: Sequence[int], prompts: int) -> None:
        """Add responses now. Their prompts are computed first; running responses wait meanwhile."""
        self._catch_up()
        self._decoding.add(batch, lengths)
        self._delay(prompts * self._decoding.times.prefill)

    def pause(self, seconds: float) -> None:
        """Stop now for so long, and keep all responses."""
        self._catch_up()
        self._delay(seconds)

    def _catch_up(self) -> None:
        if self._decoding.now < self._clock.now:  # else: in a delay
            self._decoding.advance(self._clock.now)
            self._tell()

    def _delay(self, seconds: float) -> None:
        self._decoding.now += seconds
        self._changes += 1
        self._clock.notify(self._changed)

    def _run(self) -> Process:
        while True:
            if self._decoding.is_idle:
                yield self._changed, math.inf
                continue
            ahead, changes = self._decoding.copy(), self._changes
            ahead.advance(math.inf, stop_at_batch=True)
            yield self._changed, ahead.now
            if changes == self._changes:
                self._decoding = ahead
                self._tell()

    def _tell(self) -> None:
        """Count what has ended, and wake whoever waits for a whole batch."""
        for time, batch in self._decoding.ended:
            batch.ends.append(time)
            batch.left -= 1
            if not batch.left:
                self._clock.notify(batch.is_sampled)
        self._decoding.ended = []
