"""Evaluation metrics: avg@k, pass@k and best@k with confidence intervals.

All functions take rewards per problem: ``[[1, 0, 0], [1, 1, 1]]`` is three responses to each of two problems.
Every metric is a mean over problems. Its standard error is taken over problems, because responses to one
problem are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054  # the normal distribution's 97.5% point


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems with its 95% interval."""

    mean: float
    low: float
    high: float
    stderr: float  # over problems; 0 for a single problem

    @property
    def margin(self) -> float:
        """Half the width of the interval, for display after a ±; the interval need not be symmetric."""
        return (self.high - self.low) / 2


def problem_average(rewards: Sequence[float]) -> float:
    """Return the mean reward of the responses to one problem."""
    return math.fsum(rewards) / len(rewards)


def problem_pass_at(rewards: Sequence[float], k: int) -> float:
    """Return the probability that k responses contain a correct one: 1 - C(n-c, k) / C(n, k).

    The k responses are drawn without replacement. A response is correct if its reward is positive. The
    fraction is computed as the product over i = n-c+1..n of 1 - k/i, which neither overflows nor cancels
    (Chen et al., 2021).
    """
    _check_draws(k, len(rewards))
    wrong = len(rewards) - sum(reward > 0 for reward in rewards)
    if wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(wrong + 1, len(rewards) + 1))


def problem_best_at(rewards: Sequence[float], k: int) -> float:
    """Return the expected largest of k rewards drawn without replacement.

    The i-th smallest of n is the largest of C(i-1, k-1) of the C(n, k) draws. The weights are k/n for the
    largest reward and, going down, (i-k+1)/i times the one above.
    """
    count = len(rewards)
    _check_draws(k, count)
    descending = sorted(rewards, reverse=True)
    weight = k / count
    terms = []
    for i in range(count, k - 1, -1):  # i: the reward's rank, from 1 for the smallest
        terms.append(weight * descending[count - i])
        weight *= (i - k) / (i - 1) if i > 1 else 0.0
    return math.fsum(terms)


def average_at(rewards_per_problem: Sequence[Sequence[float]]) -> Estimate:
    """Return avg@k: the mean over problems of the mean reward of k responses."""
    values = [problem_average(rewards) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]))


def pass_at(rewards_per_problem: Sequence[Sequence[float]], k: int) -> Estimate:
    """Return unbiased pass@k: the mean probability that k responses contain a correct one."""
    values = [problem_pass_at(rewards, k) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]) // k)


def best_at(rewards_per_problem: Sequence[Sequence[float]], k: int) -> Estimate:
    """Return unbiased best@k: the mean expected best reward of k responses. With 0/1 rewards, pass@k."""
    values = [problem_best_at(rewards, k) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]) // k)


def estimate(values: Sequence[float], draws: int = 1) -> Estimate:
    """Return mean and 95% interval of one value per problem, each the average of ``draws`` responses.

    Values between 0 and 1 get Wilson's score interval, which stays inside [0, 1] and keeps its width if all
    or none are correct. Averages over several responses vary less than 0/1 values. Therefore the number of
    problems n is replaced by the number of coin tosses with the same variance: n * p(1-p) / variance, at
    least n and at most n * draws. Other values get mean ± 1.96 standard errors.
    """
    count = len(values)
    mean = math.fsum(values) / count
    squares = math.fsum((value - mean) ** 2 for value in values)
    stderr = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    if min(values) < 0 or max(values) > 1:
        return Estimate(mean, mean - Z_95 * stderr, mean + Z_95 * stderr, stderr)
    most = count * max(1, draws)
    variance = squares / count
    tosses = min(most, max(count, count * mean * (1 - mean) / variance)) if variance > 0 else most
    if mean in (0.0, 1.0):
        tosses = count  # without any variance, responses to one problem may be fully dependent
    return Estimate(mean, *wilson_interval(mean, tosses), stderr)


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval for a share of successes in ``trials`` trials."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean change per problem ± 1.96 standard errors of the per-problem differences."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    count = len(changes)
    mean = math.fsum(changes) / count
    squares = math.fsum((change - mean) ** 2 for change in changes)
    stderr = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return Estimate(mean, mean - Z_95 * stderr, mean + Z_95 * stderr, stderr)


def _check_draws(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} responses cannot be drawn from {samples}: k must be between 1 and {samples}")
