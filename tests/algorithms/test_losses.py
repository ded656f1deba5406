"""GRPO, GSPO and Naive: loss and gradient of small batches, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AlignedSettings,
    FtisSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    NaiveSettings,
    SapoSettings,
    SuccessGatedSettings,
)

from .batches import Row, loss_and_gradient, make_batch, row_with_ratio

WIDE = {"clip_low": 0.2, "clip_high": 0.28}  # own responses clipped to [0.8, 1.28]


def assert_terms(
    batch, terms, losses: list[float], gradients: list[list[float]], clipped: list[float]
) -> None:
    loss, grad = loss_and_gradient(batch, terms)
    assert loss == pytest.approx(losses, rel=1e-12)
    below, above = terms.clipped_below_B, terms.clipped_above_B
    assert (below + above).tolist() == pytest.approx(clipped)
    # a low ratio is clipped where A < 0, a high one where A > 0
    for share, advantages_with_gradient in ((below, batch.advantages_B > 0), (above, batch.advantages_B < 0)):
        assert share[advantages_with_gradient].tolist() == [0.0] * int(advantages_with_gradient.sum())
    for row, expected in zip(grad, gradients, strict=True):
        assert row == pytest.approx(expected, rel=1e-12, abs=1e-15)


def tokens_with_ratios(ratios: list[float], advantage: float) -> Row:
    """An own response whose pi_k / pi_k_old per token are the given ratios."""
    behaviour = [-0.3 * (t + 1) for t in range(len(ratios))]
    logprobs = [old + math.log(ratio) for old, ratio in zip(behaviour, ratios, strict=True)]
    return Row(logprobs, behaviour, advantage, own=True)


def test_grpo_clips_token_by_token() -> None:
    batch = make_batch(
        [
            tokens_with_ratios([0.7, 1.1, 1.5], 2.0),
            tokens_with_ratios([0.7, 1.1, 1.5], -1.0),
            tokens_with_ratios([0.7, 1.1], -1.0),
        ]
    )
    # A = 2: min(1.4, 1.6) + 2.2 + min(3, 2.56) = 6.16; only 1.5 is clipped; d = -2 r / 3 elsewhere
    # A = -1: min(-0.7, -0.8) - 1.1 + min(-1.5, -1.28) = -3.4; only 0.7 is clipped; d = r / 3 elsewhere
    # the third has two tokens: -1.9 / 2, and padding without gradient
    terms = make_method(GrpoSettings()).loss(batch)
    assert_terms(
        batch,
        terms,
        [-6.16 / 3, 3.4 / 3, 1.9 / 2],
        [[-1.4 / 3, -2.2 / 3, 0.0], [0.0, 1.1 / 3, 1.5 / 3], [0.0, 1.1 / 2, 0.0]],
        [1 / 3, 1 / 3, 1 / 2],
    )
    # the ratio that is reported is the sequence's
    assert terms.ratio_B.tolist() == pytest.approx([1.155 ** (1 / 3), 1.155 ** (1 / 3), 0.77**0.5])


def sequence_batch(own: bool):
    """s below, inside and above [0.8, 1.28], with A = 2 and A = -1.5; four tokens, two in the last row."""
    rows = [row_with_ratio(s, a, own=own, tokens=4) for a in (2.0, -1.5) for s in (0.7, 1.1, 1.5)]
    return make_batch([*rows, row_with_ratio(1.1, 2.0, own=own, tokens=2)])


# A = 2:    min(1.4, 1.6) = 1.4;       2.2;    min(3, 2.56) = 2.56 (clipped: no gradient)
# A = -1.5: min(-1.05, -1.2) = -1.2 (clipped); -1.65; min(-2.25, -1.92) = -2.25
SEQUENCE_LOSSES = [-1.4, -2.2, -2.56, 1.2, 1.65, 2.25, -2.2]
# d(-s A) / d log pi_t = -s A / |y|
SEQUENCE_GRADIENTS = [
    [-0.35] * 4,
    [-0.55] * 4,
    [0.0] * 4,
    [0.0] * 4,
    [0.4125] * 4,
    [0.5625] * 4,
    [-1.1, -1.1, 0.0, 0.0],
]
SEQUENCE_CLIPPED = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_gspo_clips_whole_responses() -> None:
    batch = sequence_batch(own=True)
    terms = make_method(GspoSettings(**WIDE)).loss(batch)
    assert_terms(batch, terms, SEQUENCE_LOSSES, SEQUENCE_GRADIENTS, SEQUENCE_CLIPPED)
    assert terms.ratio_B.tolist() == pytest.approx([0.7, 1.1, 1.5, 0.7, 1.1, 1.5, 1.1])
    assert not terms.ratio_B.requires_grad


def test_gspo_of_the_paper_clips_a_ten_thousandth_away() -> None:
    rows = [row_with_ratio(s, 1.0, own=True) for s in (1.00039, 1.00041)]
    rows += [row_with_ratio(s, -1.0, own=True) for s in (0.99971, 0.99969)]
    batch = make_batch(rows)
    assert_terms(
        batch,
        make_method(GspoSettings()).loss(batch),
        [-1.00039, -1.0004, 0.99971, 0.9997],
        [[-1.00039 / 2] * 2, [0.0] * 2, [0.99971 / 2] * 2, [0.0] * 2],
        [0.0, 1.0, 0.0, 1.0],
    )


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("updates_done", [0, 3])
def test_naive_treats_every_response_as_the_learners_own(own: bool, updates_done: int) -> None:
    batch = replace(sequence_batch(own), updates_done=updates_done)
    terms = make_method(NaiveSettings(**WIDE)).loss(batch)
    assert_terms(batch, terms, SEQUENCE_LOSSES, SEQUENCE_GRADIENTS, SEQUENCE_CLIPPED)


def test_naive_over_either_length() -> None:
    # learner -3 over 2 tokens, source -2.6 over 4: s = exp(-0.1) = 0.905, or exp(-1.5 + 0.65) = exp(-0.85)
    row = Row([-1.0, -2.0], -2.6, advantage=2.0, source_length=4)
    batch = make_batch([row])
    by_source = math.exp(-0.1) * 2.0
    assert_terms(
        batch, make_method(NaiveSettings(**WIDE)).loss(batch), [-by_source], [[-by_source / 4] * 2], [0.0]
    )
    by_own = math.exp(-0.85) * 2.0
    naive = make_method(NaiveSettings(**WIDE, ratio_length="own"))
    assert_terms(batch, naive.loss(batch), [-by_own], [[-by_own / 2] * 2], [0.0])


@pytest.mark.parametrize(
    "settings",
    [
        GrpoSettings(),
        GrpoSettings(kl_coefficient=0.1),
        GspoSettings(**WIDE),
        GspoSettings(**WIDE, kl_coefficient=0.1),
        NaiveSettings(**WIDE, ratio_length="own"),
        HacpoSettings(**WIDE, alpha=0.0),
        HacpoSettings(**WIDE, alpha=0.0, ratio_length="own", cross_clip=False, kl_coefficient=0.1),
    ],
)
def test_gradient_against_finite_differences(settings) -> None:
    # away from the kinks; with alpha = 0, since finite differences see through a stop-gradient
    reference = [-1.1, -0.4, -2.0]
    rows = [
        row_with_ratio(s, a, own=True, tokens=3, reference=reference) for a in (1.0, -2.0) for s in (0.7, 1.1)
    ]
    rows += [
        row_with_ratio(s, a, own=False, tokens=3, source_length=5) for a in (1.0, -2.0) for s in (0.7, 0.9)
    ]
    rows += [tokens_with_ratios([0.7, 0.95, 1.4], 1.0), tokens_with_ratios([0.7, 0.95, 1.4], -1.0)]
    batch = make_batch(rows, updates_done=1)
    method = make_method(settings)
    assert torch.autograd.gradcheck(
        lambda logprobs: method.loss(replace(batch, logprobs_BT=logprobs)).loss_B, (batch.logprobs_BT,)
    )


@pytest.mark.parametrize(
    "settings",
    [
        GrpoSettings(),
        GspoSettings(),
        NaiveSettings(),
        HacpoSettings(),
        SuccessGatedSettings(),
        FtisSettings(),
        SapoSettings(),
        AlignedSettings(),
    ],
    ids=lambda settings: settings.name,
)
@pytest.mark.parametrize("padding", [math.nan, -math.inf])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_padding_never_leaks_into_loss_or_gradient(settings, padding: float, kl_coefficient: float) -> None:
    rows = [
        replace(tokens_with_ratios([0.9], 1.0), reference=[-0.4]),
        replace(tokens_with_ratios([0.9, 0.95, 1.1], -1.0), reference=[-0.4, -0.5, -0.6]),
    ]
    if settings.shares_rollouts:
        rows.append(row_with_ratio(0.9, 1.0, tokens=2, source_length=3, reference=[-0.4, -0.5]))
    method = make_method(replace(settings, kl_coefficient=kl_coefficient))
    clean, dirty = (
        make_batch(rows, padding=dict.fromkeys(("logprobs", "behaviour", "reference"), fill))
        for fill in (0.0, padding)
    )
    expected, got = (loss_and_gradient(batch, method.loss(batch)) for batch in (clean, dirty))
    assert got == expected
    assert all(math.isfinite(value) for value in got[0])
    assert got[1][0][1:] == [0.0, 0.0]
