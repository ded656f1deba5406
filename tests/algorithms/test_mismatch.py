"""Weights for a sampler whose numerics differ: by hand, and against plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.algorithms.mismatch import sequence_weight, token_weight
from hacrl.config.schema import (
    AlignedSettings,
    FtisSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    NaiveSettings,
    SuccessGatedSettings,
)
from hacrl.types import LossBatch

from . import independent
from .batches import Row, gradient, loss_and_gradient, make_batch

WIDE = {"clip_low": 0.2, "clip_high": 0.28}
ALL_METHODS = [
    GrpoSettings(),
    GspoSettings(**WIDE),
    NaiveSettings(**WIDE),
    HacpoSettings(**WIDE),
    SuccessGatedSettings(**WIDE),
    FtisSettings(**WIDE),
    AlignedSettings(**WIDE),
]
SEQUENCE_METHODS = ALL_METHODS[1:]


def sampled_with(batch: LossBatch, rows: Sequence[Sequence[float]], cap: float = 2.0) -> LossBatch:
    """Return the batch with these sampler log-probabilities; padding is nan, which must not be read."""
    width = batch.mask_BT.shape[1]
    padded = [[*row, *[math.nan] * (width - len(row))] for row in rows]
    return replace(batch, sampler_logprobs_BT=torch.tensor(padded, dtype=torch.float64), mismatch_cap=cap)


def ids(settings) -> str:
    return settings.name


def own(old: Sequence[float], advantage: float = 1.0, moved: float = 0.0) -> Row:
    """Return an own response whose log-probabilities changed by ``moved`` since pi_old."""
    return Row([value + moved for value in old], list(old), advantage, own=True)


def three_own() -> LossBatch:
    """pi_old / pi_sampler per token: (2, 1/4, 1), (3), (1/2, 5)."""
    log = math.log
    old = [[-1.0, -2.0, -0.5], [-1.5], [-0.3, -2.5]]
    rates = [[2.0, 0.25, 1.0], [3.0], [0.5, 5.0]]
    sampler = [[o - log(r) for o, r in zip(*pair, strict=True)] for pair in zip(old, rates, strict=True)]
    return sampled_with(make_batch([own(row) for row in old]), sampler)


def test_sequence_weights_by_hand() -> None:
    weight = sequence_weight(three_own())
    # 2 / 4 = .5; 3, capped; .5 * 5 = 2.5, capped
    assert weight.value.tolist() == pytest.approx([0.5, 2.0, 2.0], rel=1e-12)
    assert weight.is_capped.tolist() == [False, True, True]
    higher = sequence_weight(replace(three_own(), mismatch_cap=2.75))
    assert higher.value.tolist() == pytest.approx([0.5, 2.75, 2.5], rel=1e-12)
    assert higher.is_capped.tolist() == [False, True, False]
    without = sequence_weight(replace(three_own(), mismatch_cap=math.inf))
    assert without.value.tolist() == pytest.approx([0.5, 3.0, 2.5], rel=1e-12)


def test_token_weights_by_hand() -> None:
    weight = token_weight(replace(three_own(), mismatch_cap=1.5))
    expected = [[1.5, 0.25, 1.0], [1.5, 1.0, 1.0], [0.5, 1.5, 1.0]]  # padding has weight 1
    for row, values in zip(weight.value.tolist(), expected, strict=True):
        assert row == pytest.approx(values, rel=1e-12)
    assert weight.is_capped.tolist() == [[True, False, False], [True, False, False], [False, True, False]]


def test_weights_of_impossible_differences_stay_finite() -> None:
    batch = sampled_with(make_batch([own([-900.0]), own([-0.1])]), [[-0.1], [-900.0]], cap=math.inf)
    for weight in (sequence_weight(batch).value, token_weight(batch).value[:, 0]):
        assert weight.tolist() == pytest.approx([math.exp(-20), math.exp(20)], rel=1e-12)


@pytest.mark.parametrize("settings", SEQUENCE_METHODS, ids=ids)
def test_sequence_losses_by_hand(settings) -> None:
    # every token has moved by log 1.1: s = 1.1, inside [.8, 1.28]. Loss - w s A = - w * 1.1 * 2, of which
    # every token has the share 1/|y| in the gradient
    batch = three_own()
    moved = batch.logprobs_BT.detach() + math.log(1.1)
    batch = replace(batch, logprobs_BT=moved.requires_grad_(), advantages_B=2 * batch.advantages_B)
    terms = make_method(settings).loss(batch)
    loss, grad = loss_and_gradient(batch, terms)
    assert loss == pytest.approx([-1.1, -4.4, -4.4], rel=1e-12)
    assert grad[0] == pytest.approx([-1.1 / 3] * 3, rel=1e-12)
    assert grad[1] == pytest.approx([-4.4, 0.0, 0.0], rel=1e-12)
    assert grad[2] == pytest.approx([-2.2, -2.2, 0.0], rel=1e-12)
    assert terms.ratio_B.tolist() == pytest.approx([1.1] * 3, rel=1e-12)  # the sampler has no part in it
    assert terms.weight_B.tolist() == pytest.approx([0.5, 2.0, 2.0], rel=1e-12)
    assert terms.capped_B.tolist() == [0.0, 1.0, 1.0]


def test_grpo_by_hand() -> None:
    # ratios 1.1 and advantage 2: - 2.2 * mean of min(w_t, 2), which are (2, .25, 1), (2), (.5, 2)
    batch = three_own()
    moved = batch.logprobs_BT.detach() + math.log(1.1)
    batch = replace(batch, logprobs_BT=moved.requires_grad_(), advantages_B=2 * batch.advantages_B)
    terms = make_method(GrpoSettings()).loss(batch)
    loss, grad = loss_and_gradient(batch, terms)
    assert loss == pytest.approx([-2.2 * 3.25 / 3, -4.4, -2.2 * 1.25], rel=1e-12)
    assert grad[0] == pytest.approx([-4.4 / 3, -0.55 / 3, -2.2 / 3], rel=1e-12)
    assert grad[2] == pytest.approx([-0.55, -2.2, 0.0], rel=1e-12)
    assert terms.weight_B.tolist() == pytest.approx([3.25 / 3, 2.0, 1.25], rel=1e-12)
    assert terms.capped_B.tolist() == [0.0, 1.0, 0.5]  # 2 is at the cap, not above it


def random_rows(rng: random.Random, with_cross: bool) -> list[Row]:
    rows = []
    for i in range(8):
        old = [rng.uniform(-2, -0.1) for _ in range(rng.randint(1, 5))]
        logprobs = [value + rng.gauss(0, 0.2) for value in old]
        is_own = not with_cross or i % 2 == 0
        reference = [rng.uniform(-2, -0.1) for _ in old]
        rows.append(Row(logprobs, old, rng.choice([1.5, -0.7]), is_own, None, reference))
    return rows


def noisy(rng: random.Random, row: Row) -> list[float]:
    return [value + rng.gauss(0, 0.4) for value in row.behaviour]


@pytest.mark.parametrize("settings", ALL_METHODS, ids=ids)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_a_sampler_that_agrees_changes_nothing_at_all(settings, kl_coefficient: float) -> None:
    rng = random.Random(1)
    rows = random_rows(rng, with_cross=settings.shares_rollouts)
    method = make_method(replace(settings, kl_coefficient=kl_coefficient))
    plain = make_batch(rows, updates_done=1)
    corrected = replace(plain, sampler_logprobs_BT=plain.behaviour_logprobs_BT.clone(), mismatch_cap=1.0)
    expected, got = (loss_and_gradient(batch, method.loss(batch)) for batch in (plain, corrected))
    assert got == expected
    assert method.loss(corrected).weight_B.tolist() == [1.0] * 8
    assert method.loss(corrected).capped_B.tolist() == [0.0] * 8


def plain_weight(row: Row, sampler: Sequence[float], cap: float) -> float:
    ratio = 1.0
    for old, sampled in zip(row.behaviour, sampler, strict=True):
        ratio *= math.exp(old) / math.exp(sampled)
    return min(ratio, cap) if row.own else 1.0


@pytest.mark.parametrize("settings", [GspoSettings(**WIDE), HacpoSettings(**WIDE)], ids=ids)
@pytest.mark.parametrize("cap", [1.0, 1.5, 1e9])
def test_sequence_losses_against_plain_python(settings, cap: float) -> None:
    """Own responses are weighted; other agents' responses and the KL penalty are not."""
    rng = random.Random(2)
    rows = random_rows(rng, with_cross=settings.shares_rollouts)
    sampler = [noisy(rng, row) for row in rows]
    batch = sampled_with(make_batch(rows, updates_done=1), sampler, cap)
    terms = make_method(replace(settings, kl_coefficient=0.3)).loss(batch)
    hacpo = HacpoSettings()
    options = WIDE | {
        "kl_coefficient": 0.0,
        **{key: getattr(hacpo, key) for key in ("alpha", "cross_clip", "delta", "delta_step")},
        "ratio_length": hacpo.choices.ratio_length,
        "cross_upper": hacpo.cross_upper,
    }
    expected, weights = [], []
    for row, sampled in zip(rows, sampler, strict=True):
        response = {
            "logprobs": row.logprobs,
            "source_logprob": sum(row.behaviour),
            "source_length": len(row.behaviour),
        }
        weights.append(plain_weight(row, sampled, cap))
        loss = -weights[-1] * independent.response_objective(row.own, response, row.advantage, 1, options)
        if row.own:
            pairs = zip(row.logprobs, row.reference, strict=True)
            loss += 0.3 * sum(math.exp(r - n) - (r - n) - 1 for n, r in pairs) / len(row.logprobs)
        expected.append(loss)
    assert terms.loss_B.tolist() == pytest.approx(expected, rel=1e-12)
    assert terms.weight_B.tolist() == pytest.approx(weights, rel=1e-12)
    assert {row.own for row in rows} == ({True, False} if settings.shares_rollouts else {True})
    assert len({round(weight, 6) for weight in weights}) > 2  # the weights do differ


@pytest.mark.parametrize("cap", [1.0, 1.5, 1e9])
def test_grpo_against_plain_python(cap: float) -> None:
    rng = random.Random(3)
    rows = random_rows(rng, with_cross=False)
    sampler = [noisy(rng, row) for row in rows]
    terms = make_method(GrpoSettings()).loss(sampled_with(make_batch(rows), sampler, cap))
    expected = []
    for row, sampled in zip(rows, sampler, strict=True):
        total = 0.0
        for now, old, mu in zip(row.logprobs, row.behaviour, sampled, strict=True):
            ratio = math.exp(now - old)
            clipped = min(max(ratio, 0.8), 1.28)
            total += min(math.exp(old - mu), cap) * min(ratio * row.advantage, clipped * row.advantage)
        expected.append(-total / len(row.logprobs))
    assert terms.loss_B.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("settings", ALL_METHODS, ids=ids)
def test_the_gradient_is_the_uncorrected_one_times_the_weight(settings) -> None:
    """So none flows through the weight, not even if its parts could carry one."""
    rng = random.Random(4)
    rows = random_rows(rng, with_cross=False)
    plain = make_batch(rows)
    batch = sampled_with(plain, [noisy(rng, row) for row in rows], 1.5)
    method = make_method(settings)
    weights = token_weight(batch) if settings.name == "grpo" else sequence_weight(batch)
    factor = weights.value if settings.name == "grpo" else weights.value.unsqueeze(-1)
    before = torch.tensor(gradient(plain, method.loss(plain).loss_B), dtype=torch.float64)
    assert before.abs().max() > 0.1
    after = torch.tensor(gradient(batch, method.loss(batch).loss_B), dtype=torch.float64)
    torch.testing.assert_close(after, before * factor, rtol=1e-12, atol=1e-15)
    # both as if somebody had forgotten to detach them
    for name in ("behaviour_logprobs_BT", "sampler_logprobs_BT"):
        careless = replace(batch, **{name: getattr(batch, name).clone().requires_grad_()})
        assert not sequence_weight(careless).value.requires_grad
        assert not token_weight(careless).value.requires_grad


@pytest.mark.parametrize("settings", [NaiveSettings(**WIDE), HacpoSettings(**WIDE)], ids=ids)
def test_other_agents_responses_have_weight_one(settings) -> None:
    rng = random.Random(5)
    rows = [replace(row, own=False) for row in random_rows(rng, with_cross=True)]
    plain = make_batch(rows, updates_done=1)
    garbage = torch.full_like(plain.behaviour_logprobs_BT, math.nan)
    corrected = replace(plain, sampler_logprobs_BT=garbage, mismatch_cap=1.0)
    method = make_method(settings)
    expected, got = (loss_and_gradient(batch, method.loss(batch)) for batch in (plain, corrected))
    assert got == expected
