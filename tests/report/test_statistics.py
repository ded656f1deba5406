"""Confidence intervals, paired tests and Holm's correction against tables and sums by hand."""

from __future__ import annotations

import math

import pytest

from hacrl.report.statistics import (
    holm,
    mean_interval,
    paired_difference,
    regularised_beta,
    t_quantile,
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
    assert (found.mean, found.pairs) == (2.0, 3)
    assert found.p_value == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))
    assert found.low == pytest.approx(2 - 2.48414, abs=1e-4)


def test_differences_that_cannot_be_tested_have_no_p_value() -> None:
    assert paired_difference([0.3 + 0.1, 0.5], [0.3, 0.4]).p_value is None  # equal but for rounding
    assert paired_difference([1.0], [0.5]).p_value is None


def test_holm_by_hand() -> None:
    # sorted: .005 * 4 = .02, .01 * 3 = .03, .03 * 2 = .06, .04 * 1 = .04, which may not be below .06
    assert holm([0.01, 0.04, 0.03, None, 0.005]) == pytest.approx([0.03, 0.06, 0.06, None, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
