"""What a task is: problems to learn from, problems to be tested on, and a judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hacrl.types import Problem, Verdict


class Task(Protocol):
    """A verifiable task. ``train`` and ``test`` never share a problem id."""

    name: str

    @property
    def train(self) -> Sequence[Problem]:
        """Problems that may be used for learning."""
        ...

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order, so that a prefix is a fair sample."""
        ...

    def verify(self, problem: Problem, response: str) -> Verdict:
        """Judge one response. Never raises, whatever the text."""
        ...
