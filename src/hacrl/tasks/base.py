"""What a task is: problems to learn from, problems to be tested on, and a judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hacrl.types import Problem, Rollout, Verdict


class Task(Protocol):
    """A verifiable task. ``train`` and ``test`` never share a problem id.

    A task with an attribute ``judges_singly`` that is true gives each response a verdict that depends on no
    other one; its :meth:`verify` may then be called, from another thread, while others are being generated.
    """

    name: str
    max_reward: float | None  # the largest reward there is; None: not known

    @property
    def train(self) -> Sequence[Problem]:
        """Problems that may be used for learning."""
        ...

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order, so that a prefix is a fair sample."""
        ...

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Judge responses, one verdict each, in order. No text, whatever it is, makes this raise."""
        ...

    def close(self) -> None:
        """Let go of worker processes, if there are any. May be called more than once."""
        ...


@runtime_checkable
class Rehearsable(Protocol):
    """A task that runs a user's code, which can be tried out before models load."""

    def rehearse(self) -> None:
        """Judge a few made-up responses; raises :class:`hacrl.errors.TaskError` if that does not work."""
        ...


@dataclass(frozen=True)
class Checked:
    """A task whose problems every agent can be asked, and where each agent will live."""

    task: Task
    train: Sequence[Problem]
    test: Sequence[Problem]  # as many as are evaluated on
    devices: Mapping[str, str]  # agent -> device
    notes: tuple[str, ...]  # what the user should know, a sentence each
