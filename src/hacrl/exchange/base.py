"""Where agents meet: verified rollouts go in, everybody's come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hacrl.types import Problem, VerifiedRollout


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All agents' verified responses to one prompt of one step."""

    problem: Problem
    responses: dict[str, tuple[VerifiedRollout, ...]]  # agent -> its responses

    @property
    def rewards(self) -> dict[str, tuple[float, ...]]:
        """Agent -> the rewards of its responses."""
        return {agent: tuple(r.reward for r in responses) for agent, responses in self.responses.items()}


class Exchange(Protocol):
    """Publish and collect, step by step."""

    def publish(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Hand in all of one agent's rollouts of a step."""
        ...

    def collect(self, step: int, agents: Sequence[str]) -> list[PromptGroup]:
        """These agents' rollouts of a step, grouped by prompt in the order of asking; forgets them."""
        ...
