"""The sampling distribution: by hand on a few logits, and against transformers' own warpers."""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.models.sampling import sampling_logits, token_logprobs
from hacrl.types import Sampling
from tests.support.forward import warped

# softmax of these logits is 0.4, 0.3, 0.2, 0.1, in the order 2, 0, 3, 1
PROBABILITIES = [0.3, 0.1, 0.4, 0.2]
LOGITS = torch.tensor([math.log(p) for p in PROBABILITIES])


def distribution(sampling: Sampling, keep: int | None = None) -> list[float]:
    keep_ids = None if keep is None else torch.tensor(keep)
    return sampling_logits(LOGITS, sampling, keep_ids).softmax(dim=-1).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1), PROBABILITIES),
        # p^(1/T) / sum: squares .09 .01 .16 .04 over .30
        (Sampling(1, temperature=0.5), [0.3, 0.1 / 3, 1.6 / 3, 0.4 / 3]),
        # the best two, .3 and .4 over .7
        (Sampling(1, top_k=2), [3 / 7, 0, 4 / 7, 0]),
        (Sampling(1, top_k=4), PROBABILITIES),
        (Sampling(1, top_k=9), PROBABILITIES),  # more than the vocabulary has
        # before token 2: 0, before 0: .4, before 3: .7 >= .6: out; .3 and .4 over .7
        (Sampling(1, top_p=0.6), [3 / 7, 0, 4 / 7, 0]),
        # before 3: .7 < .75: in, before 1: .9: out
        (Sampling(1, top_p=0.75), [3 / 9, 0, 4 / 9, 2 / 9]),
        (Sampling(1, top_p=0.1), [0, 0, 1, 0]),  # the most likely token always stays
        # temperature first: .3 .033 .533 .133; before 0: .533 < .6, before 3: .833; .3 and .533 over .833
        (Sampling(1, temperature=0.5, top_p=0.6), [0.36, 0, 0.64, 0]),
        # without the temperature this top_p would keep two tokens; with it, one: before 0 is .533 >= .5
        (Sampling(1, temperature=0.5, top_p=0.5), [0, 0, 1, 0]),
        # top-k before top-p: among .3 and .4 over .7, before 0 is .571 >= .5; alone it would be .4 < .5
        (Sampling(1, top_k=2, top_p=0.5), [0, 0, 1, 0]),
        (Sampling(1, top_p=0.5), [3 / 7, 0, 4 / 7, 0]),
    ],
)
def test_distribution_by_hand(sampling: Sampling, expected: list[float]) -> None:
    assert distribution(sampling) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "keep", "expected"),
    [
        (Sampling(1, top_k=2), 1, [3 / 8, 1 / 8, 4 / 8, 0]),  # .3 .1 .4 over .8
        (Sampling(1, top_p=0.6), 3, [3 / 9, 0, 4 / 9, 2 / 9]),  # .3 .4 .2 over .9
        (Sampling(1, top_k=2), 0, [3 / 7, 0, 4 / 7, 0]),  # in the support anyway
    ],
)
def test_kept_token_joins_the_support(sampling: Sampling, keep: int, expected: list[float]) -> None:
    assert distribution(sampling, keep) == pytest.approx(expected, abs=1e-6)


def test_each_row_keeps_its_own_token() -> None:
    logits = LOGITS.repeat(2, 1)
    kept = sampling_logits(logits, Sampling(1, top_k=1), torch.tensor([1, 3])).softmax(dim=-1)
    # row 0: .1 .4 over .5; row 1: .4 .2 over .6
    expected = torch.tensor([[0, 0.2, 0.8, 0], [0, 0, 2 / 3, 1 / 3]])
    torch.testing.assert_close(kept, expected)


def test_logprob_of_a_token_outside_the_support_is_that_of_the_support_it_joins() -> None:
    # token 1 joins .3 and .4: log(.1 / .8)
    value = token_logprobs(LOGITS, torch.tensor(1), Sampling(1, top_k=2))
    assert value.item() == pytest.approx(math.log(0.125), rel=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.8])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
def test_agrees_with_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(50, 37, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(1, temperature, top_k, top_p)
    expected = warped(logits, sampling)
    actual = sampling_logits(logits, sampling)
    assert torch.equal(actual.isneginf(), expected.isneginf())
    torch.testing.assert_close(actual.softmax(dim=-1), expected.softmax(dim=-1))


@pytest.mark.parametrize(
    "sampling", [Sampling(1), Sampling(1, 0.6), Sampling(1, 1.3, top_k=4), Sampling(1, 0.8, top_p=0.7)]
)
def test_logprobs_sum_to_one_over_the_support(sampling: Sampling) -> None:
    logits = 2 * torch.randn(11, generator=torch.Generator().manual_seed(1))
    support = (~sampling_logits(logits, sampling).isneginf()).nonzero().squeeze(-1)
    total = math.fsum(token_logprobs(logits, token, sampling).exp().item() for token in support)
    assert total == pytest.approx(1.0, abs=1e-6)
    assert (len(support) < 11) == (sampling.top_k > 0 or sampling.top_p < 1)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    # bfloat16 has 8 bits: a log-sum over 4096 equal logits would be rounded to a multiple of 1/32
    logits = torch.zeros(4096, dtype=torch.bfloat16)
    value = token_logprobs(logits, torch.tensor(0), Sampling(1))
    assert value.item() == pytest.approx(-math.log(4096), abs=1e-5)
