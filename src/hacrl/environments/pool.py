"""Play many episodes at once. Whatever an environment does, no call waits without a limit."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import TracebackType
from typing import Any

from hacrl.environments.backends import Backend, EpisodeBackend, backend_of
from hacrl.environments.interface import (
    Call,
    EnvironmentDescription,
    EnvironmentLimits,
    EnvironmentSource,
    Factory,
    Outcome,
    row_of,
)
from hacrl.environments.replies import Reply, description_of, outcome_of
from hacrl.environments.time_limits import call_limit, time_failure
from hacrl.errors import TaskError
from hacrl.seeding import derive_seed
from hacrl.types import Problem, Tool, Turn

CALLS_PER_CORE = 8
DESCRIBE_SECONDS = 60.0  # for an environment to be made and described, at least
BUSY_SECONDS = 0.05  # until a zygote that is too busy is asked again


@dataclass(slots=True)
class _Episode:
    """An episode and the call that waits or runs."""

    environment: str
    call: Call
    message: Mapping[str, Any] | None  # None: no call waits or runs
    backend: EpisodeBackend | None = None  # None until the first call runs
    deadline: float | None = None  # of the call that runs; None: it waits
    seconds: float = 0.0  # that earlier calls took


class EnvironmentPool:
    """Plays episodes. One thread at a time may use it.

    :meth:`start`, :meth:`act` and :meth:`finish` return at once; their outcomes arrive by :meth:`wait`, one
    per call, in any order. An episode has at most one call under way.
    """

    def __init__(
        self,
        environments: Mapping[str, Factory | str | EnvironmentSource] | Factory | str | EnvironmentSource,
        limits: EnvironmentLimits | None = None,
        *,
        key: str = "task.options.environment",
    ) -> None:
        """Prepare a pool; nothing is imported and no process starts before the first use.

        ``environments``: a mapping from names, which ``Problem.environment`` selects; or a single
        environment, whose name is empty. ``key`` begins error messages on what the user gave.
        """
        self.limits = limits or EnvironmentLimits()
        self.notes: tuple[str, ...] = ()  # sentences that the user should read
        self._key = key
        self._owner = os.getpid()
        self._has_names = isinstance(environments, Mapping)
        given = environments if isinstance(environments, Mapping) else {"": environments}
        if not given:
            raise TaskError(f"{key}: names no environment")
        self._backends: dict[str, Backend] = {}
        for name, source in given.items():
            self._backends[name], note = backend_of(source, self.limits, self._key_of(name))
            self.notes += (note,) if note else ()
        self._descriptions: dict[str, EnvironmentDescription] = {}
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()  # keys of episodes whose call waits to run
        self._running: set[int] = set()
        self._running_calls = self.limits.running_calls or CALLS_PER_CORE * len(os.sched_getaffinity(0))
        self._arrived: list[tuple[int, Outcome]] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the environments; ``("",)`` for a single one without a name."""
        return tuple(self._backends)

    def check(self) -> None:
        """Import and try all environments; raise :class:`hacrl.errors.TaskError` with the cause."""
        for name in self._backends:
            self.describe(name)

    def describe(self, environment: str = "") -> EnvironmentDescription:
        """Return what an environment offers. The first call imports it; raise TaskError if that fails."""
        name = self._name_of(environment)
        if name not in self._descriptions:
            self._descriptions[name] = self._describe(name)
        return self._descriptions[name]

    def tools(self, environment: str = "") -> tuple[Tool, ...]:
        """Return the tools of an environment; none for the text form."""
        return self.describe(environment).tools

    def is_text(self, environment: str = "") -> bool:
        """Return whether an environment has the text form."""
        return self.describe(environment).is_text

    def start(self, key: int, problem: Problem, seed: int = 0) -> None:
        """Begin an episode: make an environment and reset it with the problem's row.

        Python's and numpy's global generators are seeded by ``seed`` and the problem's id: episodes of a
        problem start alike. The first episode of an environment imports it, and waits for that. Raise
        ValueError for a key in use, TaskError if there is no such environment or it cannot be imported.
        """
        self._forget_episodes_of_parent()
        if key in self._episodes:
            raise ValueError(f"an episode with the key {key} is under way")
        name = self.describe(problem.environment).name
        row = row_of(problem)
        if self._has_names:
            row.pop("environment", None)  # it selects the environment, as in TRL
        message = {"call": "start", "row": row, "seed": derive_seed(seed, "environment", problem.id)}
        self._episodes[key] = _Episode(name, "start", None)
        self._ask(key, "start", message)

    def act(self, key: int, action: Turn) -> None:
        """Give the environment an assistant's turn: all tool calls in order, or the text in the text form.

        A tool that raises, or that does not exist, answers with an error; the episode goes on.
        """
        calls = [[call.name, call.arguments] for call in action.tool_calls]
        self._ask(key, "act", {"call": "act", "content": action.content, "tool_calls": calls})

    def finish(self, key: int) -> None:
        """Ask for the reward and end the episode. The key is free once the outcome has arrived."""
        self._ask(key, "finish", {"call": "finish"})

    def discard(self, key: int) -> None:
        """End an episode at once; what it was asked has no outcome. Do nothing for an unknown key."""
        self._arrived = [(other, outcome) for other, outcome in self._arrived if other != key]
        self._drop(key)

    def wait(self, timeout: float | None = None) -> list[tuple[int, Outcome]]:
        """Return the outcomes that have arrived; wait up to ``timeout`` seconds for the first one.

        None: until there is one, which the limits on time bound. Return at once if no call is under way.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self._collect(0.0)
        while not self._arrived and (self._running or self._waiting):
            now = time.monotonic()
            if until is not None and now >= until:
                break
            self._collect(self._patience(until, now))
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def pending(self) -> int:
        """The number of calls whose outcome has not been returned."""
        return len(self._running) + len(self._waiting) + len(self._arrived)

    def close(self) -> None:
        """End all episodes and processes. May be called more than once; a later use starts anew."""
        self._forget_episodes_of_parent()
        for key in list(self._episodes):
            self._drop(key)
        self._arrived.clear()
        for backend in self._backends.values():
            backend.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, key: int, call: Call, message: Mapping[str, Any]) -> None:
        """Note a call, and run it if not too many run already."""
        episode = self._episodes.get(key)
        if episode is None:
            raise ValueError(f"there is no episode with the key {key}: it has ended, or never began")
        if episode.message is not None:
            raise ValueError(f"the episode with the key {key} has not answered the last call")
        episode.call, episode.message = call, message
        self._waiting.append(key)
        self._run_waiting()

    def _run_waiting(self) -> None:
        """Run calls in order, as far as limits allow."""
        while self._waiting and len(self._running) < self._running_calls:
            key = self._waiting[0]
            episode = self._episodes[key]
            if episode.backend is None:
                episode.backend = self._backends[episode.environment].new_episode()
                if episode.backend is None:
                    return
            self._waiting.popleft()
            assert episode.message is not None
            limit = call_limit(self.limits, episode.seconds)
            episode.backend.send(episode.message, limit)
            episode.deadline = time.monotonic() + limit + episode.backend.grace
            self._running.add(key)

    def _patience(self, until: float | None, now: float) -> float:
        """Return the seconds until something must be done if nothing arrives."""
        times = [] if until is None else [until]
        times += [self._episodes[key].deadline or now for key in self._running]
        if self._waiting and len(self._running) < self._running_calls:
            times.append(now + BUSY_SECONDS)
        return max(0.0, min(times) - now)

    def _collect(self, seconds: float) -> None:
        """Wait so long for replies; take them, end episodes that are out of time, and run waiting calls."""
        keys = list(self._running)
        readable = _poll([self._backend(key) for key in keys], seconds)
        ready = {key for key in keys if self._backend(key).fileno() in readable}
        now = time.monotonic()
        for key in sorted(self._running):
            episode, backend = self._episodes[key], self._backend(key)
            reply = backend.receive() if key in ready else None
            if reply is None and now >= (episode.deadline or now):
                backend.kill_supervisor()
                reply = Reply(kind="timeout")
            if reply is not None:
                self._take(key, episode, reply)
        self._run_waiting()

    def _backend(self, key: int) -> EpisodeBackend:
        backend = self._episodes[key].backend
        assert backend is not None
        return backend

    def _take(self, key: int, episode: _Episode, reply: Reply) -> None:
        if reply.kind == "timeout":
            reply = replace(reply, failure=time_failure(self.limits, episode.seconds))
        outcome = outcome_of(episode.call, reply)
        self._arrived.append((key, outcome))
        self._running.discard(key)
        episode.message, episode.deadline = None, None
        episode.seconds += outcome.seconds
        if outcome.failure or outcome.call == "finish":
            self._drop(key)

    def _drop(self, key: int) -> None:
        """End an episode and forget it."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        self._running.discard(key)
        if episode.message is not None and episode.deadline is None:
            self._waiting.remove(key)
        if episode.backend is not None:
            episode.backend.end()

    def _describe(self, name: str) -> EnvironmentDescription:
        """Ask an environment that is made for this what it offers."""
        self._forget_episodes_of_parent()
        limit = max(self.limits.call_seconds, DESCRIBE_SECONDS)
        deadline = time.monotonic() + limit
        while (episode := self._backends[name].new_episode()) is None:
            if time.monotonic() > deadline:
                raise TaskError(f"{self._key_of(name)}: the process that starts environments does not answer")
            time.sleep(BUSY_SECONDS)
        try:
            episode.send({"call": "describe"}, limit)
            deadline = time.monotonic() + limit + episode.grace
            while (reply := episode.receive()) is None and (left := deadline - time.monotonic()) > 0:
                _poll([episode], left)
        finally:
            episode.end()
        if reply is None or reply.kind == "timeout":
            reply = Reply(failure=f"could not be made within {limit:g} s")
        failure = reply.failure or reply.content.get("failure")
        if failure:
            raise TaskError(f"{self._key_of(name)}: the environment {failure}")
        return description_of(name, reply.content)

    def _key_of(self, name: str) -> str:
        return f"{self._key}.{name}" if name else self._key

    def _name_of(self, environment: str) -> str:
        name = environment if self._has_names else ""
        if name not in self._backends:
            near = get_close_matches(name, self._backends, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            names = ", ".join(self._backends)
            raise TaskError(f"{self._key}: there is no environment {name!r}{hint} Valid names: {names}")
        return name

    def _forget_episodes_of_parent(self) -> None:
        """After a fork, drop the episodes without ending them: they belong to the parent process."""
        if os.getpid() == self._owner:
            return
        self._owner = os.getpid()
        self._episodes.clear()
        self._waiting.clear()
        self._running.clear()
        self._arrived.clear()
        for backend in self._backends.values():
            backend.forget()


def _poll(episodes: Sequence[EpisodeBackend], seconds: float) -> set[int]:
    """Wait so long until something can be read or written; return the file descriptors."""
    poll = select.poll()  # select.select fails beyond file descriptor 1023
    for episode in episodes:
        poll.register(episode.fileno(), select.POLLIN | (select.POLLOUT if episode.wants_to_write else 0))
    return {fd for fd, _ in poll.poll(seconds * 1000 + 1 if seconds > 0 else 0)}
