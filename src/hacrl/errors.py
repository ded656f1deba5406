"""Errors a user can act on. Each is also a standard exception, so generic handlers still work."""

from __future__ import annotations

from hacrl.plain_text import printable


class HacrlError(Exception):
    """Base of all errors that hacrl reports without a traceback."""

    def __str__(self) -> str:
        """Return the message, escaped: it may quote control characters from files, servers or models."""
        return printable(super().__str__(), multiline=True)


class ConfigError(HacrlError, ValueError):
    """The configuration is wrong; the message names the key, its value and the fix."""


class ModelError(HacrlError, ValueError):
    """A model or tokenizer cannot be used as an agent."""


class TaskError(HacrlError, ValueError):
    """A task cannot provide problems or judge answers."""


class TrainingError(HacrlError, RuntimeError):
    """Training cannot continue, e.g. because a loss is not finite."""


class CheckpointError(HacrlError, RuntimeError):
    """A checkpoint cannot be written, or is damaged."""


class ForeignRolloutsError(TrainingError):
    """An agent's own rollouts were not sampled from its policy, so it must not be trained on them."""

    agent: str | None = None  # set by the agent's worker
