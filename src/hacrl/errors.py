"""Errors that a user can act on. Each is also a standard exception, so that generic handlers still work."""

from __future__ import annotations

from collections.abc import Mapping

from hacrl.plain_text import printable


class HacrlError(Exception):
    """Base class of all errors that the command line prints as one message, without a traceback."""

    def __str__(self) -> str:
        """Return the message without control characters: it may quote files, servers and models."""
        return printable(super().__str__(), multiline=True)


class ConfigError(HacrlError, ValueError):
    """The configuration or another input is wrong; the message names the key, its value and the fix."""


class ModelError(HacrlError, ValueError):
    """A model or tokenizer cannot be used as an agent."""


class TaskError(HacrlError, ValueError):
    """A task cannot provide problems or judge answers."""


class TrainingError(HacrlError, RuntimeError):
    """Training cannot continue, e.g. because a loss is not finite."""


class WorkerLostError(TrainingError):
    """Processes that work for agents are gone: killed, out of reach, or silent for too long."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        """``lost``: agent -> what happened, as a sentence without a full stop."""
        self.lost = dict(lost)
        super().__init__("; ".join(f"agent {agent!r}: {what}" for agent, what in self.lost.items()))

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[dict[str, str]]]:
        """Survive the way from another process."""
        return type(self), (self.lost,)


class EngineMismatchError(TrainingError):
    """An engine's log-probabilities differ from the learner's: its rollouts must not be trained on."""

    agent: str | None = None  # set by the agent's worker


class CheckpointError(HacrlError, RuntimeError):
    """A checkpoint cannot be written, or differs from what was written."""
