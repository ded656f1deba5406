"""What an agent's process tells the run's process while it works: phases, responses, results, errors.

A verb of a process is a stream of these events. The last ones are results; an error ends the stream.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hacrl.errors import HacrlError
from hacrl.training.observer import Observer, Phase
from hacrl.training.reporter import Reporter

RESPONSES_SECONDS = 0.25  # between two events that count responses
MOST_WAITING = 16  # events that have not left the process: files and tensors come piece by piece


@dataclass(frozen=True, slots=True)
class PhaseBegun:
    """An agent has begun a phase."""

    phase: Phase
    agent: str


@dataclass(frozen=True, slots=True)
class ResponsesFinished:
    """Further responses of an agent have finished."""

    agent: str
    count: int


@dataclass(frozen=True, slots=True)
class Result:
    """What a verb returns for an agent, with the agent's number of updates and the seconds by phase."""

    agent: str
    value: Any
    policy_version: int
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that a user can act on. Others end the process's call, and Ray carries them."""

    error: HacrlError


Event = PhaseBegun | ResponsesFinished | Result | Failed


class EventStream(Observer):
    """Calls a function in another thread, and yields the events that it puts here while it computes."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event | BaseException | None] = queue.Queue(MOST_WAITING)
        self._responses: dict[str, int] = {}  # finished, not yet put
        self._last_put = 0.0
        self.reporter = Reporter(self)

    def run(self, function: Callable[[EventStream], None], threads: ThreadPoolExecutor) -> Iterator[Event]:
        """Yield the events of ``function(self)`` until it returns; raise what it raises.

        ``threads`` are kept from call to call: torch has CPU threads and memory for every thread that
        has computed.
        """

        def call() -> None:
            try:
                function(self)
                self._put_responses()
                self._events.put(None)
            except HacrlError as error:
                self._events.put(Failed(error))
                self._events.put(None)
            except BaseException as error:
                self._events.put(error)

        threads.submit(call)
        while (event := self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event

    def result(self, agent: str, value: Any, policy_version: int) -> None:
        """Put the result of one agent."""
        self._put_responses()
        own = {key: taken for key, taken in self.reporter.seconds.items() if key.endswith(f"/{agent}")}
        self._events.put(Result(agent, value, policy_version, own))

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Put the beginning of a phase."""
        self._put_responses()
        self._events.put(PhaseBegun(phase, agent))

    def on_response(self, agent: str) -> None:
        """Count a response; put the count every so often, because every event is a message."""
        self._responses[agent] = self._responses.get(agent, 0) + 1
        if time.monotonic() - self._last_put > RESPONSES_SECONDS:
            self._put_responses()

    def _put_responses(self) -> None:
        waiting, self._responses = self._responses, {}
        self._last_put = time.monotonic()
        for agent, count in waiting.items():
            self._events.put(ResponsesFinished(agent, count))
