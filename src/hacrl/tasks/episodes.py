"""What a task with environments has beside the members of every task: its episodes, and their limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hacrl.environments.pool import EnvironmentPool


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """When an episode ends, if neither the environment nor the agent ends it.

    The tokens of the opening, all actions and all observations together are limited by
    ``rollout.max_new_tokens``.
    """

    max_turns: int = 8  # actions of the agent
    max_turn_tokens: int | None = None  # of one action; None: as many as the episode may still have
    # From the beginning of the episode by the clock, looked at between two turns; None: no limit.
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_turns", self.max_turns, 1),
            ("max_turn_tokens", self.max_turn_tokens, 1),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
        seconds = self.max_seconds
        if seconds is not None and (isinstance(seconds, bool) or not 0 < seconds < float("inf")):
            raise ValueError(f"max_seconds={seconds!r}: must be a positive number of seconds")


@runtime_checkable
class PlaysEpisodes(Protocol):
    """A task whose responses are episodes with an environment.

    The problems' ``tools`` and ``environment`` are those of the environment. ``verify`` gets rollouts with an
    :class:`~hacrl.types.Episode`.
    """

    episode_limits: EpisodeLimits

    def open_environments(self) -> EnvironmentPool:
        """Return a new pool of the task's environments. Every agent of a process has one, and closes it."""
        ...
