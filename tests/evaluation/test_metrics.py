"""avg@k, pass@k and best@k against every subset there is, and intervals against hand-made numbers."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl.evaluation.metrics import (
    Estimate,
    average_at,
    best_at,
    paired_change,
    pass_at,
    problem_best_at,
    problem_pass_at,
    wilson_interval,
)

REWARDS = [0.0, 0.25, 1.0, 0.25, -0.5, 3.0, 0.0]


def best_of_all_draws(rewards: list[float], k: int) -> float:
    """The definition: every draw of k, its best, the mean."""
    draws = list(combinations(rewards, k))
    return sum(max(draw) for draw in draws) / len(draws)


@pytest.mark.parametrize("k", range(1, 8))
def test_best_at_k_is_the_mean_over_every_draw(k):
    assert problem_best_at(REWARDS, k) == pytest.approx(best_of_all_draws(REWARDS, k), rel=1e-12)


@pytest.mark.parametrize("right", range(8))
@pytest.mark.parametrize("k", range(1, 8))
def test_pass_at_k_is_the_mean_over_every_draw(right, k):
    rewards = [1.0] * right + [0.0] * (7 - right)
    expected = best_of_all_draws(rewards, k)
    assert problem_pass_at(rewards, k) == pytest.approx(expected, abs=1e-12)
    assert problem_best_at(rewards, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_by_hand():
    # n = 10, c = 3: 1 - C(7,5)/C(10,5) = 1 - 21/252 = 11/12
    assert problem_pass_at([1.0] * 3 + [0.0] * 7, 5) == pytest.approx(11 / 12, rel=1e-14)
    # two problems: 11/12 and 0
    both = pass_at([[1.0] * 3 + [0.0] * 7, [0.0] * 10], 5)
    assert both.mean == pytest.approx(11 / 24, rel=1e-14)


def test_many_samples_neither_overflow_nor_cancel():
    # n = 20000, c = 1: the chance to draw the one right answer is k/n exactly
    rewards = [1.0] + [0.0] * 19999
    assert problem_pass_at(rewards, 10000) == pytest.approx(0.5, rel=1e-12)
    assert problem_best_at(rewards, 10000) == pytest.approx(0.5, rel=1e-12)
    assert problem_pass_at(rewards, 1) == pytest.approx(1 / 20000, rel=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=9), st.data())
def test_best_at_k_of_any_rewards(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    assert problem_best_at(rewards, k) == pytest.approx(best_of_all_draws(rewards, k), abs=1e-9)


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("metric", [pass_at, best_at])
def test_more_draws_than_answers_are_refused(metric, k):
    with pytest.raises(ValueError, match=f"k={k} responses cannot be drawn from 3"):
        metric([[1.0, 0.0, 0.0]], k)


def test_average_is_over_problems_with_wilson_for_single_answers():
    # 7 of 10, z = 1.96: centre (.7 + z2/20) / (1 + z2/10), z2 = 3.8415: .89207/1.38415 = .64449
    # half = 1.96 sqrt(.021 + 3.8415/400) / 1.38415 = .24773
    found = average_at([[1.0]] * 7 + [[0.0]] * 3)
    assert found.mean == pytest.approx(0.7)
    assert found.low == pytest.approx(0.39676, abs=2e-4)
    assert found.high == pytest.approx(0.89222, abs=2e-4)
    assert found.stderr == pytest.approx(math.sqrt(0.21 / 9))


def test_none_right_is_not_certainly_none():
    # Wilson at 0 of 30: z2 / (30 + z2) = 3.8415 / 33.8415
    for samples in (1, 16):
        found = average_at([[0.0] * samples] * 30)
        assert (found.mean, found.low) == (0.0, 0.0)
        assert found.high == pytest.approx(3.8415 / 33.8415, abs=1e-5)


def test_repeating_the_same_answers_does_not_narrow_the_interval():
    once = average_at([[1.0], [0.0], [1.0], [0.0]])
    often = average_at([[1.0] * 50, [0.0] * 50, [1.0] * 50, [0.0] * 50])
    assert often == once


def test_answers_that_spread_evenly_count_one_by_one():
    # every problem at 1 of 2: no spread over problems, so the 8 answers are worth 8 tosses, no more
    found = average_at([[1.0, 0.0]] * 4)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.5, 8))
    # means .5, .5, 1, 0: variance 1/8, so .25 / (1/8) = 2 tosses a problem
    mixed = average_at([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert (mixed.low, mixed.high) == pytest.approx(wilson_interval(0.5, 8))
    # means .75, .25 of 4 answers: variance 1/16, 4 tosses a problem: the most 4 answers are worth
    wide = average_at([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert (wide.low, wide.high) == pytest.approx(wilson_interval(0.5, 8))
    # means .5, .5, .5, .75: p = .5625, variance .01171875: 84 tosses would spread as little; 16 are the most
    even = average_at([[1.0, 1.0, 0.0, 0.0]] * 3 + [[1.0, 1.0, 1.0, 0.0]])
    assert (even.low, even.high) == pytest.approx(wilson_interval(0.5625, 16))


def test_rewards_beyond_one_get_the_normal_interval():
    # values 0, 2: mean 1, variance 2 over 1 degree, stderr sqrt(2/2) = 1
    found = average_at([[0.0, 0.0], [1.0, 3.0]])
    assert (found.mean, found.stderr) == (1.0, 1.0)
    assert (found.low, found.high) == pytest.approx((1 - 1.959964, 1 + 1.959964))


def test_a_change_is_paired_by_problem():
    # differences 1, 0, 1, 0: mean .5, variance 1/3, stderr sqrt(1/12)
    change = paired_change([0.0, 0.5, 0.0, 1.0], [1.0, 0.5, 1.0, 1.0])
    assert (change.mean, change.stderr) == (0.5, pytest.approx(math.sqrt(1 / 12)))
    # everyone the same step up: no doubt, however different the problems are
    assert paired_change([0.0, 0.5, 0.25], [0.25, 0.75, 0.5]) == Estimate(0.25, 0.25, 0.25, 0.0)
    with pytest.raises(ValueError, match="longer"):
        paired_change([0.0], [0.0, 1.0])


def test_the_interval_covers_what_it_claims():
    """Exact coverage for one answer per problem: the probability of every count whose interval holds p."""
    for p in (0.05, 0.3, 0.5, 0.9):
        covered = 0.0
        for right in range(31):
            found = average_at([[1.0]] * right + [[0.0]] * (30 - right))
            if found.low <= p <= found.high:
                covered += math.comb(30, right) * p**right * (1 - p) ** (30 - right)
        assert 0.92 < covered < 0.99
