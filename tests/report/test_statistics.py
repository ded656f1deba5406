"""Confidence intervals, paired tests and Holm's correction against tables and sums by hand."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from hacrl.report.statistics import (
    holm,
    mean_interval,
    noncentrality,
    paired_difference,
    regularised_beta,
    t_quantile,
    t_test_power,
    t_two_sided,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (29, 2.0452), (1000, 1.9623)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-5)


def test_p_values_in_closed_form() -> None:
    # one degree of freedom is Cauchy: P(|T| >= 1) = 1/2; two: P(|T| >= t) = 1 - t / sqrt(2 + t^2)
    assert t_two_sided(1.0, 1) == pytest.approx(0.5)
    assert t_two_sided(-3.0, 2) == pytest.approx(1 - 3 / math.sqrt(11))
    assert t_two_sided(0.0, 5) == pytest.approx(1.0)
    assert regularised_beta(0.3, 2, 1) == pytest.approx(0.09)  # I_x(2, 1) = x^2


def test_an_interval_of_three_values() -> None:
    # mean 2, sd 1: 2 +- 4.3027 / sqrt(3) = 2 +- 2.4841
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - 2.48414, abs=1e-4)
    assert found.high == pytest.approx(2 + 2.48414, abs=1e-4)
    one = mean_interval([5.0])
    assert (one.mean, one.low, one.high) == (5.0, None, None)


def test_paired_differences() -> None:
    # differences 1, 2, 3: t = 2 / (1 / sqrt(3)) = 3.4641, two degrees: p = 1 - 3.4641 / sqrt(14) = 0.07418
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (found.mean, found.pairs, found.positive) == (2.0, 3, 3)
    assert found.p_value == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))
    assert found.low == pytest.approx(2 - 2.48414, abs=1e-4)


def test_differences_that_cannot_be_tested_have_no_p_value() -> None:
    assert paired_difference([0.3 + 0.1, 0.5], [0.3, 0.4]).p_value is None  # equal but for rounding
    assert paired_difference([1.0], [0.5]).p_value is None


def test_power_without_an_effect_is_the_error_rate() -> None:
    for degrees in (1, 2, 4, 29):
        assert t_test_power(0.0, degrees) == pytest.approx(0.05, abs=1e-6)


def test_power_is_the_share_of_simulated_studies_that_find_the_effect() -> None:
    # an independent implementation: 20,000 studies of 5 seeds with a true difference of 1.2 deviations
    draw = random.Random(0)
    found = 0
    for _ in range(20_000):
        values = [draw.gauss(1.2, 1.0) for _ in range(5)]
        error = statistics.stdev(values) / math.sqrt(5)
        found += abs(statistics.fmean(values)) > 2.7764 * error
    assert t_test_power(1.2 * math.sqrt(5), 4) == pytest.approx(found / 20_000, abs=0.01)


@pytest.mark.parametrize(("seeds", "effect"), [(5, 1.682), (10, 0.996), (30, 0.529)])
def test_detectable_effects_are_those_of_printed_tables(seeds: int, effect: float) -> None:
    # effect sizes of a paired t-test with 80% power at the 5% level, in deviations of the differences
    assert noncentrality(seeds - 1) / math.sqrt(seeds) == pytest.approx(effect, abs=1e-3)


def test_the_detectable_difference_grows_with_the_spread() -> None:
    # differences 1, 2, 3: standard error 1 / sqrt(3), two degrees
    found = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.detectable == pytest.approx(noncentrality(2) / math.sqrt(3))
    assert paired_difference([1.0], [0.5]).detectable is None


def test_holm_by_hand() -> None:
    # sorted: .005 * 4 = .02, .01 * 3 = .03, .03 * 2 = .06, .04 * 1 = .04, which may not be below .06
    assert holm([0.01, 0.04, 0.03, None, 0.005]) == pytest.approx([0.03, 0.06, 0.06, None, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
