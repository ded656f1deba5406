"""HACPO's loss (eq. 47-53): loss and gradient of small batches, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, HacpoSettings

from .batches import Row, loss_and_gradient, make_batch, row_with_ratio


def assert_terms(
    settings: HacpoSettings, rows: list[Row], expected: list[tuple], updates_done: int = 0
) -> None:
    """``expected``: per row (objective, gradient of the objective per token, clipped)."""
    batch = make_batch(rows, updates_done=updates_done)
    terms = make_method(settings).loss(batch)
    loss, grad = loss_and_gradient(batch, terms)
    assert [-value for value in loss] == pytest.approx([row[0] for row in expected], rel=1e-12)
    for got, row, wanted in zip(grad, rows, expected, strict=True):
        tokens = len(row.logprobs)
        assert [-value for value in got[:tokens]] == pytest.approx([wanted[1]] * tokens, rel=1e-12)
        assert got[tokens:] == [0.0] * (len(got) - tokens)
        if wanted[2]:
            assert got == [0.0] * len(got)  # a clipped response carries exactly none
    sides = zip(terms.ratio_B.tolist(), terms.clipped_below_B, terms.clipped_above_B, strict=True)
    # every test's intervals contain a ratio close to 1: what is clipped below is below it
    assert [(float(below), float(above)) for _, below, above in sides] == [
        (float(row[2] and s < 0.95), float(row[2] and s > 0.95))
        for row, s in zip(expected, terms.ratio_B.tolist(), strict=True)
    ]


def cross(ratio: float, advantage: float, tokens: int = 2, source_length: int = 4) -> Row:
    return row_with_ratio(ratio, advantage, own=False, tokens=tokens, source_length=source_length)


def test_cross_responses_below_inside_and_above() -> None:
    # alpha = 2, [0.8, 1]: clip(s)^3 * A, and clip(s)^2 * s * A / |y| of gradient inside, |y| = 4
    assert_terms(
        HacpoSettings(alpha=2.0),
        [cross(s, 1.5) for s in (0.7, 0.9, 1.1)],
        [
            (0.512 * 1.5, 0.0, True),  # 0.8^3
            (0.729 * 1.5, 0.729 * 1.5 / 4, False),  # 0.9^3
            (1.5, 0.0, True),  # 1
        ],
    )


def test_cross_responses_have_no_min() -> None:
    # With A < 0, a `min` of clipped and plain would leave s = 1.1 unclipped: -1.1 with a gradient.
    assert_terms(
        HacpoSettings(alpha=1.0),
        [cross(s, -1.0) for s in (0.7, 0.9, 1.1)],
        [(-0.64, 0.0, True), (-0.81, -0.81 / 4, False), (-1.0, 0.0, True)],
    )


def test_gradient_divides_by_the_source_length_or_by_the_learners_own() -> None:
    row = Row([-1.0, -2.0, -1.0], -4.2, advantage=2.0, source_length=5)
    # source: s = exp((-4 + 4.2) / 5) = exp(0.04): above 1, clipped
    assert_terms(HacpoSettings(), [row], [(2.0, 0.0, True)])
    # own: s = exp(-4 / 3 + 4.2 / 5) = exp(-0.4933) = 0.611, inside with delta = 0.5; over 3 tokens
    s = math.exp(-4 / 3 + 0.84)
    settings = HacpoSettings(ratio_length="own", delta=0.5)
    assert_terms(settings, [row], [(s * s * 2.0, s * s * 2.0 / 3, False)])


def test_lower_bound_rises_with_the_updates() -> None:
    rows = [cross(s, 1.0) for s in (0.79, 0.86, 0.88)]
    # alpha = 1, u = 0: bound 0.8
    inside = [(0.64, 0.0, True), (0.7396, 0.7396 / 4, False), (0.7744, 0.7744 / 4, False)]
    assert_terms(HacpoSettings(), rows, inside)
    # u = 3: bound 0.8 + 3 * 0.025 = 0.875, 0.875^2 = 0.765625
    tighter = [(0.765625, 0.0, True), (0.765625, 0.0, True), (0.7744, 0.7744 / 4, False)]
    assert_terms(HacpoSettings(), rows, tighter, updates_done=3)
    # without the schedule u does not matter
    assert_terms(HacpoSettings(delta_step=0.0), rows, inside, updates_done=3)


def test_own_responses_ignore_cross_agent_settings() -> None:
    # [0.8, 1.28] and a `min`; alpha, delta and u must not matter
    rows = [row_with_ratio(s, a, own=True, tokens=3) for a in (2.0, -1.5) for s in (0.7, 1.1, 1.5)]
    expected = [
        (1.4, 1.4 / 3, False),
        (2.2, 2.2 / 3, False),
        (2.56, 0.0, True),
        (-1.2, 0.0, True),
        (-1.65, -1.65 / 3, False),
        (-2.25, -2.25 / 3, False),
    ]
    for alpha, delta, updates_done in [(0.0, 0.2, 0), (1.0, 0.2, 3), (3.0, 0.01, 5)]:
        settings = HacpoSettings(clip_low=0.2, clip_high=0.28, alpha=alpha, delta=delta)
        assert_terms(settings, rows, expected, updates_done)


def test_own_and_cross_rows_in_one_batch() -> None:
    # the same numbers, once as the learner's own and once as another's; [1 - 0.0003, 1.0004] and [0.8, 1]
    rows = [
        row_with_ratio(0.9, 1.0, own=True, tokens=2),
        cross(0.9, 1.0, tokens=2, source_length=2),
        row_with_ratio(0.9, -1.0, own=True, tokens=3),
        cross(1.0002, -1.0, tokens=2, source_length=2),
        row_with_ratio(1.0002, -1.0, own=True, tokens=2),
    ]
    expected = [
        (0.9, 0.45, False),  # min(0.9, 0.9997)
        (0.81, 0.405, False),  # 0.9 * 0.9^1
        (-0.9997, 0.0, True),  # min(-0.9, -0.9997)
        (-1.0, 0.0, True),  # above 1
        (-1.0002, -0.5001, False),
    ]
    assert_terms(HacpoSettings(), rows, expected)


def test_without_cross_clipping_every_response_has_a_gradient() -> None:
    rows = [cross(s, -2.0) for s in (0.5, 0.9, 1.5)]
    # s^3 * A with alpha = 2, gradient s^3 * A / 4, whatever u is
    cubes = [(-2.0 * s**3, -2.0 * s**3 / 4, False) for s in (0.5, 0.9, 1.5)]
    assert_terms(HacpoSettings(alpha=2.0, cross_clip=False), rows, cubes, updates_done=5)


def test_upper_bound_is_an_option() -> None:
    rows = [cross(s, 1.0) for s in (0.9, 1.04, 1.1)]
    # alpha = 1: 1.04^2 = 1.0816 with gradient, 1.05^2 = 1.1025 without
    expected = [(0.81, 0.2025, False), (1.0816, 0.2704, False), (1.1025, 0.0, True)]
    assert_terms(HacpoSettings(cross_upper=1.05), rows, expected)


def test_a_response_with_ratio_one_has_a_gradient() -> None:
    # equal log-probabilities: s = exp(0) = 1, on the bound, which belongs to the interval
    assert_terms(HacpoSettings(alpha=3.0), [Row([-1.0, -0.5], -1.5, 2.0)], [(2.0, 1.0, False)])


def test_penalty_on_own_rows_only() -> None:
    ln2 = math.log(2.0)
    own = Row([-1.0, -1.0], [-1.0, -1.0], 1.0, own=True, reference=[-1.0 + ln2, -1.0 + ln2])
    other = Row([-1.0, -1.0], -2.0, 1.0, own=False, reference=[-1.0 + ln2, -1.0 + ln2])
    # s = 1, A = 1: objective 1, gradient 1/2 a token. k3 = 2 - ln 2 - 1 = 1 - ln 2 with gradient (1 - 2) / 2
    # a token: own objective 1 - 0.1 * (1 - ln 2), gradient 1/2 + 0.05
    expected = [(1.0 - 0.1 * (1 - ln2), 0.55, False), (1.0, 0.5, False)]
    assert_terms(HacpoSettings(kl_coefficient=0.1), [own, other], expected)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_impossible_token_in_a_cross_response(advantage: float) -> None:
    # log pi_k = -inf: s is as good as 0, below the bound 0.8. Clipped exponent: 0.8 * 0.8 * A.
    impossible = Row([-0.5, -math.inf], -1.0, advantage)
    fine = cross(0.9, advantage, tokens=2)
    batch = make_batch([impossible, fine])
    loss, grad = loss_and_gradient(batch, make_method(HacpoSettings()).loss(batch))
    assert loss[0] == pytest.approx(-0.64 * advantage, abs=1e-8)
    assert grad[0] == [0.0, 0.0]
    assert loss[1] == pytest.approx(-0.81 * advantage)
    assert grad[1] == pytest.approx([-0.81 * advantage / 4] * 2)


@pytest.mark.parametrize("cross_clip", [True, False])
@pytest.mark.parametrize("alpha", [1.0, 3.0, 5.0])
def test_a_far_own_response_does_not_depend_on_the_exponent(cross_clip: bool, alpha: float) -> None:
    # s = e^19.5 of an own response in single precision: s^5 overflows, but own responses have no exponent
    row = Row([-1.0, -2.0], -42.0, -1.0, own=True)
    batch = make_batch([row], dtype=torch.float32)
    gspo = loss_and_gradient(batch, make_method(GspoSettings()).loss(batch))
    settings = HacpoSettings(alpha=alpha, cross_clip=cross_clip)
    assert loss_and_gradient(batch, make_method(settings).loss(batch)) == gspo
    assert gspo[0] == pytest.approx([math.exp(19.5)], rel=1e-5)
    assert gspo[1][0] == pytest.approx([math.exp(19.5) / 2] * 2, rel=1e-5)
