"""Play many episodes at once, each in a process of its own; nothing an environment does can hang the caller."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from hacrl.environments.interface import (
    EnvironmentDescription,
    EnvironmentLimits,
    EnvironmentSource,
    Factory,
    Outcome,
)
from hacrl.types import Problem, Tool, Turn


class EnvironmentPool:
    """Plays episodes. One thread at a time may use it.

    :meth:`start`, :meth:`act` and :meth:`finish` return at once; their outcomes arrive by :meth:`wait`, one per
    call, in any order. An episode has at most one call under way.
    """

    notes: tuple[str, ...]  # sentences that the user should read

    def __init__(
        self,
        environments: Mapping[str, Factory | str | EnvironmentSource] | Factory | str | EnvironmentSource,
        limits: EnvironmentLimits | None = None,
        *,
        key: str = "task.options.environment",
    ) -> None:
        """Prepare a pool; nothing is imported and no process starts before the first use.

        ``environments``: a mapping from names, which ``Problem.environment`` selects; or a single environment,
        whose name is empty. ``key`` begins error messages on what the user gave.
        """
        self.limits = limits or EnvironmentLimits()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the environments; ``("",)`` for a single one without a name."""
        raise RuntimeError

    def check(self) -> None:
        """Import and try all environments; raise :class:`hacrl.errors.TaskError` with the cause and the fix."""

    def describe(self, environment: str = "") -> EnvironmentDescription:
        """Return what an environment offers. The first call imports it; raise TaskError if that fails."""
        raise RuntimeError

    def tools(self, environment: str = "") -> tuple[Tool, ...]:
        """Return the tools of an environment; none for the text form."""
        return self.describe(environment).tools

    def is_text(self, environment: str = "") -> bool:
        """Return whether an environment has the text form."""
        return self.describe(environment).is_text

    def start(self, key: int, problem: Problem, seed: int = 0) -> None:
        """Begin an episode: make an environment and reset it with the problem's row.

        Python's and numpy's global generators are seeded by ``seed`` and the problem's id: episodes of a problem
        start alike. Raise ValueError for a key in use, TaskError if the problem names no environment of the pool.
        """

    def act(self, key: int, action: Turn) -> None:
        """Give the environment an assistant's turn: all tool calls in order, or the text in the text form.

        A tool that raises, or that does not exist, answers with an error; the episode goes on.
        """

    def finish(self, key: int) -> None:
        """Ask for the reward and end the episode. The key is free once the outcome has arrived."""

    def discard(self, key: int) -> None:
        """End an episode at once; what it was asked has no outcome. Do nothing for an unknown key."""

    def wait(self, timeout: float | None = None) -> list[tuple[int, Outcome]]:
        """Return the outcomes that have arrived; wait up to ``timeout`` seconds for the first one.

        None: until there is one, which the limits on time bound. Return at once if no call is under way.
        """
        raise RuntimeError

    @property
    def pending(self) -> int:
        """The number of calls whose outcome has not been returned."""
        raise RuntimeError

    def close(self) -> None:
        """End all episodes and processes. May be called more than once; a later use starts anew."""

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
