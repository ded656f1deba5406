"""The k3 penalty to a frozen reference policy, and the rows it applies to."""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.algorithms.kl import k3_divergence
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, NaiveSettings

from .batches import Row, gradient, loss_and_gradient, make_batch, row_with_ratio

NAN, INF = math.nan, math.inf
LN2 = math.log(2.0)
# log r = log pi_ref - log pi_k: ln 2, -ln 2 and 0
THREE = Row([-1.0, -1.0, -2.0], [-1.0, -1.0, -2.0], 0.0, own=True, reference=[-1.0 + LN2, -1.0 - LN2, -2.0])


def test_k3_by_hand() -> None:
    batch = make_batch([THREE])
    k3 = k3_divergence(batch.logprobs_BT, batch.reference_logprobs_BT, batch.mask_BT)
    # r - log r - 1: 2 - ln 2 - 1 = 1 - ln 2;  1/2 + ln 2 - 1 = ln 2 - 1/2;  0. Mean = (1/2) / 3
    assert k3.tolist() == pytest.approx([1 / 6], rel=1e-12)
    # d / d log pi_k = (1 - r) / 3: -1/3, 1/6, 0
    assert gradient(batch, k3)[0] == pytest.approx([-1 / 3, 1 / 6, 0.0], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("padding", [NAN, -INF, INF, -5.0])
def test_k3_counts_response_tokens_only(padding: float) -> None:
    short = Row([-1.0], [-1.0], 0.0, own=True, reference=[-1.0 + LN2])
    batch = make_batch([short, THREE], padding=dict.fromkeys(("logprobs", "behaviour", "reference"), padding))
    k3 = k3_divergence(batch.logprobs_BT, batch.reference_logprobs_BT, batch.mask_BT)
    # one token: 1 - ln 2, over 1 and not over 3; d = 1 - r = -1
    assert k3.tolist() == pytest.approx([1 - LN2, 1 / 6], rel=1e-12)
    grad = gradient(batch, k3)
    assert grad[0] == pytest.approx([-1.0, 0.0, 0.0], rel=1e-12)
    assert grad[0][1:] == [0.0, 0.0]


def test_k3_is_zero_at_the_reference_and_unbiased() -> None:
    # E_{pi_k}[k3] = KL(pi_k || pi_ref), summed exactly over a three-word vocabulary
    policy, reference = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    rows = [
        Row([math.log(p)], [math.log(p)], 0.0, own=True, reference=[math.log(q)])
        for p, q in zip(policy, reference, strict=True)
    ]
    batch = make_batch(rows)
    k3 = k3_divergence(batch.logprobs_BT, batch.reference_logprobs_BT, batch.mask_BT).tolist()
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    assert sum(p * value for p, value in zip(policy, k3, strict=True)) == pytest.approx(divergence, rel=1e-12)
    same = k3_divergence(batch.logprobs_BT, batch.logprobs_BT.detach(), batch.mask_BT)
    assert same.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("settings_type", [GrpoSettings, GspoSettings, NaiveSettings, HacpoSettings])
def test_penalty_is_added_to_the_loss_of_own_responses(settings_type) -> None:
    batch = make_batch([THREE])
    loss, grad = loss_and_gradient(batch, make_method(settings_type(kl_coefficient=0.3)).loss(batch))
    # advantage 0: only 0.3 * 1/6 = 0.05 and 0.3 * (-1/3, 1/6, 0) remain
    assert loss == pytest.approx([0.05], rel=1e-12)
    assert grad[0] == pytest.approx([-0.1, 0.05, 0.0], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("settings_type", [NaiveSettings, HacpoSettings])
def test_cross_responses_carry_no_penalty(settings_type) -> None:
    # the same response, as another agent's: its reference log-probabilities must not matter
    cross = Row(THREE.logprobs, THREE.behaviour, 0.5, own=False, reference=THREE.reference)
    batch = make_batch([THREE, cross])
    with_kl = loss_and_gradient(batch, make_method(settings_type(kl_coefficient=0.3)).loss(batch))
    without = loss_and_gradient(batch, make_method(settings_type()).loss(batch))
    assert with_kl[0][0] == pytest.approx(0.05, rel=1e-12)
    assert (with_kl[0][1], with_kl[1][1]) == (without[0][1], without[1][1])
    # s = 1: loss -A = -0.5, gradient -A / 3 per token
    assert without[0][1] == pytest.approx(-0.5)
    assert without[1][1] == pytest.approx([-0.5 / 3] * 3)


@pytest.mark.parametrize("settings_type", [NaiveSettings, HacpoSettings])
def test_an_impossible_token_in_a_cross_response_does_not_reach_the_penalty(settings_type) -> None:
    # Another agent's token that the learner cannot produce (top-k, top-p: log pi = -inf). Cross
    # responses have no penalty, so the loss is the method's own: finite, without gradient.
    rows = [
        THREE,
        Row([-0.5, -INF], -1.0, 1.0, own=False, reference=[-0.5, -0.5]),
        Row([-0.5, -0.5], -1.0, 0.0, own=False, reference=[-0.5, -INF]),
    ]
    batch = make_batch(rows)
    terms = make_method(settings_type(kl_coefficient=0.3)).loss(batch)
    plain = make_method(settings_type()).loss(batch)
    assert terms.loss_B[1:].tolist() == plain.loss_B[1:].tolist()
    grad = gradient(batch, terms.loss_B)
    assert grad[0] == pytest.approx([-0.1, 0.05, 0.0], rel=1e-12, abs=1e-15)
    assert grad[1] == [0.0, 0.0, 0.0]
    assert grad[2] == [0.0, 0.0, 0.0]


def test_zero_coefficient_needs_no_reference() -> None:
    method = make_method(HacpoSettings())
    assert not method.needs_reference
    batch = make_batch([row_with_ratio(1.0, 2.0, own=True)])
    assert method.loss(batch).loss_B.tolist() == pytest.approx([-2.0])
    assert make_method(HacpoSettings(kl_coefficient=0.001)).needs_reference
    with pytest.raises(AssertionError, match="reference"):
        make_method(HacpoSettings(kl_coefficient=0.001)).loss(batch)


def test_penalty_gradient_against_finite_differences() -> None:
    batch = make_batch([THREE])

    def penalty(logprobs: torch.Tensor) -> torch.Tensor:
        return k3_divergence(logprobs, batch.reference_logprobs_BT, batch.mask_BT)

    assert torch.autograd.gradcheck(penalty, (batch.logprobs_BT,))
