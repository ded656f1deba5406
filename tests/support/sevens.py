"""A task that random agents sometimes solve: write a seven."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.types import Problem, Rollout, Verdict


def problem(prompt: str) -> Problem:
    """Return a problem whose id is its prompt."""
    return Problem(prompt, prompt, "7")


class SevensTask:
    """Reward 1 for a response with a 7 in it."""

    def __init__(self, problems: int = 12) -> None:
        self.name = "sevens"
        self.max_reward = 1.0
        prompts = [f"{'1' * (1 + i % 3)}+{i}:" for i in range(problems + 5)]  # of different lengths
        self.train: Sequence[Problem] = [problem(prompt) for prompt in prompts[:problems]]
        self.test: Sequence[Problem] = [problem(prompt) for prompt in prompts[problems:]]

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Judge each rollout by its text alone."""
        return [self.judge(rollout.text) for rollout in rollouts]

    def judge(self, response: str) -> Verdict:
        if "7" in response:
            return Verdict(1.0, "correct")
        return Verdict(0.0, "wrong" if response else "unparsable")

    def close(self) -> None:
        """Do nothing."""
