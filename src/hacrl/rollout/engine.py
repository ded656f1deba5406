"""The seam between asking for responses and whatever produces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hacrl.types import Problem, Rollout, Sampling


class RolloutEngine(Protocol):
    """Samples responses of one agent, with the log-probabilities they were sampled with."""

    def generate(
        self, problems: Sequence[Problem], samples_per_prompt: int, sampling: Sampling, seed: int
    ) -> list[Rollout]:
        """``samples_per_prompt`` responses to each problem, problem by problem; a seed fixes them."""
        ...
