"""Group a step's rollouts by prompt: each learner compares all agents' responses to the same prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hacrl.types import Problem, VerifiedRollout


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All agents' verified responses to one prompt of one step."""

    problem: Problem
    responses: dict[str, tuple[VerifiedRollout, ...]]  # agent -> its responses
    # Agents whose responses teach; all rewards count for advantages. None: all agents of the group.
    teachers: tuple[str, ...] | None = None
    step: int | None = None  # that the responses were sampled for; None: the step that is learnt

    def teaches(self, agent: str) -> bool:
        """Return whether learners may train on this agent's responses."""
        return self.teachers is None or agent in self.teachers

    @property
    def counted(self) -> dict[str, dict[int, VerifiedRollout]]:
        """Agent -> its responses whose rewards count, by their index; only agents that have some.

        The reward of a failed episode says nothing about the agent.
        """
        found = {
            agent: {i: verified for i, verified in enumerate(responses) if not verified.rollout.has_failed}
            for agent, responses in self.responses.items()
        }
        return {agent: responses for agent, responses in found.items() if responses}

    @property
    def rewards(self) -> dict[str, tuple[float, ...]]:
        """Agent -> the rewards of its responses, as far as they count."""
        return {
            agent: tuple(verified.reward for verified in responses.values())
            for agent, responses in self.counted.items()
        }


def rewards_that_count(rollouts: Iterable[VerifiedRollout]) -> list[float]:
    """Return the rewards of rollouts whose environment did not fail."""
    return [verified.reward for verified in rollouts if not verified.rollout.has_failed]


def group_by_prompt(rollouts: Mapping[str, Sequence[VerifiedRollout]]) -> list[PromptGroup]:
    """Group a step's rollouts (agent -> rollouts) by prompt, in the order in which prompts first occur."""
    problems: dict[str, Problem] = {}
    grouped: dict[str, dict[str, list[VerifiedRollout]]] = {}
    for agent, answers in rollouts.items():
        for verified in answers:
            problem = verified.rollout.problem
            problems.setdefault(problem.id, problem)
            grouped.setdefault(problem.id, {}).setdefault(agent, []).append(verified)
    return [
        PromptGroup(problems[key], {agent: tuple(group) for agent, group in groups.items()})
        for key, groups in grouped.items()
    ]
