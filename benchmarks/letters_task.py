"""A task of random letters for random weights: rewards are drawn by the response's text, so work is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from shapes import prompts

from hacrl.types import Problem, Rollout, Verdict

HELD_OUT = 8


class Letters:
    """Rewards of 0 or 1 by a hash of the text: every prompt has both, and every process draws the same."""

    name = "letters"
    max_reward = 1.0
    independent_verdicts = True

    def __init__(self, problems: int = 64, letters: int = 448) -> None:
        found = [
            Problem(f"p{number}", text, "none")
            for number, text in enumerate(prompts(problems + HELD_OUT, letters))
        ]
        self.train, self.test = found[HELD_OUT:], found[:HELD_OUT]

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Draw a reward for each response."""
        return [self._verdict(rollout.text) for rollout in rollouts]

    def _verdict(self, text: str) -> Verdict:
        is_right = hashlib.sha256(text.encode()).digest()[0] % 2
        return Verdict(float(is_right), "correct" if is_right else "wrong")

    def close(self) -> None:
        """Do nothing."""
