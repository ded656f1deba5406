"""Sequence and token ratios, exponential importance sampling (eq. 11, 12)."""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.algorithms.importance import exponential_weight, sequence_ratio, token_ratio

from .batches import Row, gradient, make_batch, row_with_ratio

NAN, INF = math.nan, math.inf
# Learner: 2 tokens, log pi_k = -1 - 2 = -3. Source: 4 tokens, log pi_j_old = -2.6.
RETOKENISED = Row([-1.0, -2.0], -2.6, advantage=1.0, source_length=4)
# Shared tokenizer, 3 tokens: log pi_k = -1.5, log pi_j_old = -1.2.
SAME_TOKENS = Row([-0.5, -0.25, -0.75], [-0.4, -0.5, -0.3], advantage=1.0)


def test_ratio_over_the_source_length() -> None:
    batch = make_batch([RETOKENISED, SAME_TOKENS])
    ratio = sequence_ratio(batch)
    # (-3 + 2.6) / 4 = -0.1 and (-1.5 + 1.2) / 3 = -0.1
    assert ratio.tolist() == pytest.approx([math.exp(-0.1)] * 2, rel=1e-12)
    # d s / d log pi_t = s / |y|, over the source's length, 0 in the padding
    share = math.exp(-0.1)
    expected = [[share / 4, share / 4, 0.0], [share / 3] * 3]
    for row, wanted in zip(gradient(batch, ratio), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-12)


def test_ratio_over_own_lengths() -> None:
    batch = make_batch([RETOKENISED, SAME_TOKENS])
    ratio = sequence_ratio(batch, "own")
    # -3 / 2 + 2.6 / 4 = -0.85: each mean in its own token space; -0.1 again where the tokens are shared
    assert ratio.tolist() == pytest.approx([math.exp(-0.85), math.exp(-0.1)], rel=1e-12)
    # the learner's mean is over its own 2 tokens
    expected = [[math.exp(-0.85) / 2, math.exp(-0.85) / 2, 0.0], [math.exp(-0.1) / 3] * 3]
    for row, wanted in zip(gradient(batch, ratio), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-12)


def test_token_ratio() -> None:
    short = Row([-1.0], [-1.5], advantage=1.0)
    ratio = token_ratio(make_batch([SAME_TOKENS, short]))
    # exp(-0.5 + 0.4), exp(-0.25 + 0.5), exp(-0.75 + 0.3); exp(-1 + 1.5), then padding: 1
    assert ratio[0].tolist() == pytest.approx([math.exp(-0.1), math.exp(0.25), math.exp(-0.45)], rel=1e-12)
    assert ratio[1].tolist() == pytest.approx([math.exp(0.5), 1.0, 1.0], rel=1e-12)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 1.0), (1.0, 0.9), (2.0, 0.81), (3.0, 0.729)])
def test_exponential_weight(alpha: float, expected: float) -> None:
    ratio = torch.tensor([0.9], dtype=torch.float64)
    assert exponential_weight(ratio, alpha).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_exponential_weight_carries_no_gradient(alpha: float) -> None:
    batch = make_batch([row_with_ratio(0.9, 1.0, tokens=2, source_length=4)])
    ratio = sequence_ratio(batch)
    weight = exponential_weight(ratio, alpha)
    assert not weight.requires_grad
    # s~ = s * stopgrad(s)^alpha, so d s~ / d log pi_t = 0.9^alpha * 0.9 / 4; not (1 + alpha) times that
    expected = 0.9**alpha * 0.9 / 4
    assert gradient(batch, ratio * weight)[0] == pytest.approx([expected, expected], rel=1e-12)


@pytest.mark.parametrize("length", ["source", "own"])
@pytest.mark.parametrize("padding", [NAN, -INF, INF])
def test_padding_never_leaks(length, padding: float) -> None:
    rows = [Row([-1.0], -1.0, advantage=1.0), Row([-1.0, -0.5, -0.25], -1.75, advantage=1.0)]
    garbage = dict.fromkeys(("logprobs", "behaviour", "reference"), padding)
    batch = make_batch(rows, padding=garbage)
    for ratio in (sequence_ratio(batch, length), token_ratio(batch)[:, 0]):
        assert torch.isfinite(ratio).all()
    # s = 1 in the first row, d s / d log pi = 1 / 1 there and exactly 0 in the padding
    assert sequence_ratio(batch, length)[0].item() == 1.0
    assert gradient(batch, sequence_ratio(batch, length))[0] == [1.0, 0.0, 0.0]
    # per token: exp(-1 + 1) = 1 where the behaviour is known
    known = make_batch([Row([-1.0], [-1.0], 1.0), Row([-1.0, -1.0], [-1.0, -1.0], 1.0)], padding=garbage)
    assert token_ratio(known).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert gradient(known, token_ratio(known)) == [[1.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("length", ["source", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_impossible_token_gives_a_negligible_ratio_without_gradient(length, dtype) -> None:
    batch = make_batch([Row([-0.5, -INF], -1.0, advantage=1.0)], dtype=dtype)
    ratio = sequence_ratio(batch, length)
    assert 0.0 <= ratio.item() < 1e-8
    assert gradient(batch, ratio) == [[0.0, 0.0]]


@pytest.mark.parametrize("logprob", [-1e4, -1.0])
def test_far_apart_policies_keep_the_ratio_finite_in_single_precision(logprob: float) -> None:
    # log ratios of -9999 and, the other way round, +9999 per token: exp would be 0 or inf
    row = Row([logprob], [-1e4 - 1.0 - logprob], advantage=1.0)
    batch = make_batch([row], dtype=torch.float32)
    for ratio in (sequence_ratio(batch), token_ratio(batch)):
        assert (ratio.item() > 1e8) if logprob == -1.0 else (ratio.item() < 1e-8)
        assert math.isfinite(ratio.item())
        assert gradient(batch, ratio) == [[0.0]]


def test_large_ratios_are_exact_up_to_there() -> None:
    # a ratio of e^15 is far outside any clip range, but is still what it is: s = 3269017.37
    row = Row([-1.0], [-16.0], advantage=1.0)
    batch = make_batch([row])
    assert sequence_ratio(batch).item() == pytest.approx(math.exp(15.0), rel=1e-12)
    assert token_ratio(batch).item() == pytest.approx(math.exp(15.0), rel=1e-12)
