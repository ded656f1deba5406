"""Statistics of a few paired values: confidence intervals, p-values, Holm's correction, and power.

Student's t distribution is computed here from the regularised incomplete beta function, so that hacrl needs
no further package.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95
POWER = 0.8
NORMAL_QUANTILE = 1.959963984540054  # of (1 + CONFIDENCE) / 2
TEST = "two-sided paired t-test over seeds; p-values of one table corrected by Holm's method"


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; no interval for a single value."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences.

    The interval needs two pairs; p-value and smallest detectable difference need differences that differ.
    """

    mean: float
    low: float | None
    high: float | None
    p_value: float | None
    pairs: int
    positive: int  # pairs in which the difference is above 0
    detectable: float | None  # the smallest true difference that the test finds with a probability of POWER


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with the confidence interval of Student's t."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None)
    error = statistics.stdev(values) / math.sqrt(len(values)) * t_quantile(len(values) - 1)
    return Interval(mean, mean - error, mean + error)


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> PairedDifference:
    """Return the mean difference ``values - reference`` with its interval and the p-value of a t-test."""
    differences = [own - other for own, other in zip(values, reference, strict=True)]
    interval = mean_interval(differences)
    p_value = detectable = None
    if len(differences) > 1:
        deviation = statistics.stdev(differences)
        # differences that are equal but for rounding leave nothing to test
        if deviation > 1e-12 * max(1.0, abs(interval.mean)):
            error = deviation / math.sqrt(len(differences))
            p_value = t_two_sided(interval.mean / error, len(differences) - 1)
            detectable = error * noncentrality(len(differences) - 1)
    positive = sum(difference > 0 for difference in differences)
    return PairedDifference(
        interval.mean, interval.low, interval.high, p_value, len(differences), positive, detectable
    )


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return the p-values corrected for as many comparisons as there are p-values (Holm, 1979)."""
    given = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    for rank, (p, i) in enumerate(given):
        highest = max(highest, min(1.0, (len(given) - rank) * p))
        corrected[i] = highest
    return corrected


def t_two_sided(t: float, degrees: int) -> float:
    """Return P(|T| >= |t|) for Student's t distribution."""
    return regularised_beta(degrees / (degrees + t * t), degrees / 2, 0.5)


def t_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the t for which P(|T| <= t) is ``confidence``."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if t_two_sided(middle, degrees) > 1 - confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


@lru_cache
def noncentrality(degrees: int, power: float = POWER, confidence: float = CONFIDENCE) -> float:
    """Return the true mean, in standard errors, that a two-sided t-test finds with probability ``power``."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        if t_test_power(middle, degrees, confidence) < power:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_test_power(noncentrality: float, degrees: int, confidence: float = CONFIDENCE) -> float:
    """Return the probability that a two-sided t-test rejects 0, for a true mean in standard errors.

    The probability is that of |Z + mean| > t S, with a standard normal Z and S^2 chi-squared divided by its
    degrees of freedom. Given S it has a closed form; Simpson's rule averages it over the density of S.
    """
    quantile = t_quantile(degrees, confidence)
    steps, largest = 2000, 1 + 9 / math.sqrt(2 * degrees)  # S has mean near 1 and deviation 1 / sqrt(2 df)
    width = largest / steps
    log_constant = math.log(2) + degrees / 2 * math.log(degrees / 2) - math.lgamma(degrees / 2)
    total = 0.0
    for i in range(1 if degrees > 1 else 0, steps + 1):  # above one degree the density at 0 is 0
        s = i * width
        log_density = log_constant - degrees * s * s / 2 + ((degrees - 1) * math.log(s) if s > 0 else 0.0)
        beyond = _normal(noncentrality - quantile * s) + _normal(-noncentrality - quantile * s)
        weight = 1 if i in (0, steps) else 4 if i % 2 else 2
        total += weight * math.exp(log_density) * beyond
    return total * width / 3


def _normal(z: float) -> float:
    """Return P(Z <= z) for a standard normal Z."""
    return math.erfc(-z / math.sqrt(2)) / 2


def regularised_beta(x: float, a: float, b: float) -> float:
    """Return I_x(a, b) by Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges fast
        return 1 - regularised_beta(1 - x, b, a)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    ) - math.log(a)
    return math.exp(log_front) * _beta_fraction(x, a, b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    result = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            result *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return result
