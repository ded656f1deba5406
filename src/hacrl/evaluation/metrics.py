"""Numbers an evaluation is summed up in: avg@k, pass@k, best@k, and how sure they are.

All take rewards problem by problem: ``[[1, 0, 0], [1, 1, 1]]`` is three answers to each of two problems.
Every metric is a mean over problems of one number per problem, so its error is taken over problems: answers
to one problem are not independent of each other.
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
    stderr: float  # over problems; 0 where there is one problem

    @property
    def margin(self) -> float:
        """Half the interval's width, to be written behind a ±; the interval need not be symmetric."""
        return (self.high - self.low) / 2


def problem_average(rewards: Sequence[float]) -> float:
    """Mean reward of the answers to one problem."""
    return math.fsum(rewards) / len(rewards)


def problem_pass_at(rewards: Sequence[float], k: int) -> float:
    """Chance that one of k answers drawn without replacement is right: 1 - C(n-c, k) / C(n, k).

    An answer is right if its reward is positive. The fraction is the product over i = n-c+1..n of 1 - k/i,
    which neither overflows nor cancels (Chen et al., 2021).
    """
    _check_draws(k, len(rewards))
    right = sum(reward > 0 for reward in rewards)
    wrong = len(rewards) - right
    if wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(wrong + 1, len(rewards) + 1))


def problem_best_at(rewards: Sequence[float], k: int) -> float:
    """Expected largest reward of k answers drawn without replacement, for rewards of any kind.

    The i-th smallest of n is the largest of C(i-1, k-1) of the C(n, k) draws. The weights are k/n for the
    largest reward and, going down, (i-k+1)/i times the one above.
    """
    count = len(rewards)
    _check_draws(k, count)
    descending = sorted(rewards, reverse=True)
    weight = k / count
    terms = []
    for i in range(count, k - 1, -1):  # i: the reward's rank from below
        terms.append(weight * descending[count - i])
        weight *= (i - k) / (i - 1) if i > 1 else 0.0
    return math.fsum(terms)


def average_at(rewards_per_problem: Sequence[Sequence[float]]) -> Estimate:
    """avg@k: mean over problems of the mean reward of k answers."""
    values = [problem_average(rewards) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]))


def pass_at(rewards_per_problem: Sequence[Sequence[float]], k: int) -> Estimate:
    """pass@k, unbiased: mean over problems of the chance that k answers hold a right one."""
    values = [problem_pass_at(rewards, k) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]) // k)


def best_at(rewards_per_problem: Sequence[Sequence[float]], k: int) -> Estimate:
    """best@k, unbiased: mean over problems of the expected best of k answers. With 0/1 rewards, pass@k."""
    values = [problem_best_at(rewards, k) for rewards in rewards_per_problem]
    return estimate(values, draws=len(rewards_per_problem[0]) // k)


def estimate(values: Sequence[float], draws: int = 1) -> Estimate:
    """Mean and 95% interval of one value per problem; ``draws`` independent ones stand behind each value.

    Values between 0 and 1 get Wilson's score interval, which stays inside [0, 1] and keeps its width where
    all or none are right. With one answer per problem it is Wilson's own. Averages over several answers
    spread less than 0/1 values, so the number of problems n is replaced by the number of coin tosses that
    would spread as much: n * p(1-p) / variance, at least n and at most n * draws. Other values get mean
    ± 1.96 standard errors.
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
        tosses = count  # no spread seen at all: no reason to take answers to one problem for independent
    return Estimate(mean, *wilson_interval(mean, tosses), stderr)


def wilson_interval(share: float, trials: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a share of so many trials."""
    z2 = Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_change(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Mean change per problem, same problems before and after, ± 1.96 standard errors of the differences."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    count = len(changes)
    mean = math.fsum(changes) / count
    squares = math.fsum((change - mean) ** 2 for change in changes)
    stderr = math.sqrt(squares / (count - 1) / count) if count > 1 else 0.0
    return Estimate(mean, mean - Z_95 * stderr, mean + Z_95 * stderr, stderr)


def _check_draws(k: int, samples: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} answers cannot be drawn from {samples}: k must be between 1 and {samples}")
