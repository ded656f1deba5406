"""Accuracy of one agent alone: mean reward of sampled answers to held-out problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.types import VerifiedRollout


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean over problems of the mean reward per problem, and its standard error over problems."""

    mean: float
    stderr: float
    problems: int
    samples: int  # per problem


def accuracy_of(rewards_per_problem: Sequence[Sequence[float]]) -> Accuracy:
    """Samples of one problem are not independent, so the error is taken over problems."""
    means = [math.fsum(rewards) / len(rewards) for rewards in rewards_per_problem]
    count = len(means)
    mean = math.fsum(means) / count
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1) if count > 1 else 0.0
    return Accuracy(mean, math.sqrt(variance / count), count, len(rewards_per_problem[0]))


def accuracy_by_problem(verified: Sequence[VerifiedRollout], samples: int) -> Accuracy:
    """Of ``samples`` responses to each problem, problem by problem."""
    rewards = [one.reward for one in verified]
    return accuracy_of([rewards[i : i + samples] for i in range(0, len(rewards), samples)])
