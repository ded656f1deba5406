from __future__ import annotations

from hacrl.rollouts.groups import group_by_prompt
from hacrl.types import Problem, Rollout, Verdict, VerifiedRollout


def verified(agent: str, problem: str, reward: float) -> VerifiedRollout:
    rollout = Rollout.single_turn(
        Problem(problem, f"{problem}?", "1"), agent, "x", (1,), (-1.0,), "stop", 0, "t"
    )
    return VerifiedRollout(rollout, Verdict(reward, "correct" if reward else "wrong"))


def test_responses_are_grouped_by_prompt_in_order_of_first_occurrence():
    groups = group_by_prompt(
        {
            "a": [verified("a", "q2", 1.0), verified("a", "q1", 0.0), verified("a", "q1", 0.5)],
            "b": [verified("b", "q2", 0.25), verified("b", "q1", 0.75)],
        }
    )
    assert [group.problem.id for group in groups] == ["q2", "q1"]
    assert [group.rewards for group in groups] == [
        {"a": (1.0,), "b": (0.25,)},
        {"a": (0.0, 0.5), "b": (0.75,)},
    ]
