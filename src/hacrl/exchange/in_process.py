"""The exchange of agents that live in one process."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.exchange.base import PromptGroup
from hacrl.types import Problem, VerifiedRollout


class InProcessExchange:
    """See :class:`hacrl.exchange.base.Exchange`."""

    def __init__(self) -> None:
        self._published: dict[int, dict[str, list[VerifiedRollout]]] = {}

    def publish(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Hand in all of one agent's rollouts of a step."""
        self._published.setdefault(step, {})[agent] = list(rollouts)

    def collect(self, step: int, agents: Sequence[str]) -> list[PromptGroup]:
        """These agents' rollouts of a step, grouped by prompt in the order of asking; forgets them."""
        published = self._published.pop(step)
        missing = [agent for agent in agents if agent not in published]
        assert not missing, f"step {step}: nothing published by {missing}"
        problems: dict[str, Problem] = {}
        grouped: dict[str, dict[str, list[VerifiedRollout]]] = {}
        for agent in agents:
            for verified in published[agent]:
                problem = verified.rollout.problem
                problems.setdefault(problem.id, problem)
                grouped.setdefault(problem.id, {}).setdefault(agent, []).append(verified)
        return [
            PromptGroup(problems[key], {agent: tuple(group) for agent, group in groups.items()})
            for key, groups in grouped.items()
        ]
