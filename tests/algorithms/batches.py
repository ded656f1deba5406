"""Small loss batches for the tests, in float64, with a leaf tensor to take gradients of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.types import LossBatch, LossTerms

# What padding holds unless a test says otherwise: values that would be noticed if they leaked.
PADDING = {"logprobs": -3.7, "behaviour": 2.9, "reference": -8.1}


@dataclass(frozen=True)
class Row:
    """One response. ``behaviour`` is per token, or the sum alone for a retokenised response."""

    logprobs: Sequence[float]
    behaviour: Sequence[float] | float
    advantage: float
    own: bool = False
    source_length: int | None = None  # default: as many as the learner's tokens
    reference: Sequence[float] | None = None


def row_with_ratio(
    ratio: float,
    advantage: float,
    *,
    own: bool = False,
    tokens: int = 2,
    source_length: int | None = None,
    reference: Sequence[float] | None = None,
) -> Row:
    """A response whose s is ``ratio``: log pi_k(y) - log pi_j_old(y) = source_length * log(ratio).

    The learner's log-probability is spread unevenly (1 : 2 : 3 ...) over its tokens.
    """
    length = tokens if source_length is None else source_length
    behaviour = -1.3 * length
    total = behaviour + length * math.log(ratio)
    shares = [(t + 1) / (tokens * (tokens + 1) / 2) for t in range(tokens)]
    return Row([total * share for share in shares], behaviour, advantage, own, length, reference)


def make_batch(
    rows: Sequence[Row],
    *,
    updates_done: int = 0,
    dtype: torch.dtype = torch.float64,
    padding: dict[str, float] | None = None,
) -> LossBatch:
    """Rows, right-padded. ``batch.logprobs_BT`` is a leaf that collects the gradient."""
    padding = padding or PADDING
    width = max(len(row.logprobs) for row in rows)

    def padded(values: Sequence[float], fill: float) -> list[float]:
        return [*values, *[fill] * (width - len(values))]

    def per_token(row: Row) -> Sequence[float]:
        return [0.0] * len(row.logprobs) if isinstance(row.behaviour, float) else row.behaviour

    def tensor(values: list) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    has_reference = any(row.reference is not None for row in rows)
    return LossBatch(
        logprobs_BT=tensor([padded(row.logprobs, padding["logprobs"]) for row in rows]).requires_grad_(),
        mask_BT=torch.tensor([[t < len(row.logprobs) for t in range(width)] for row in rows]),
        behaviour_logprobs_BT=tensor([padded(per_token(row), padding["behaviour"]) for row in rows]),
        behaviour_logprob_B=tensor(
            [row.behaviour if isinstance(row.behaviour, float) else math.fsum(row.behaviour) for row in rows]
        ),
        source_length_B=tensor([row.source_length or len(row.logprobs) for row in rows]),
        advantages_B=tensor([row.advantage for row in rows]),
        is_own_B=torch.tensor([row.own for row in rows]),
        updates_done=updates_done,
        reference_logprobs_BT=(
            tensor([padded(row.reference or row.logprobs, padding["reference"]) for row in rows])
            if has_reference
            else None
        ),
    )


def gradient(batch: LossBatch, values_B: Tensor) -> list[list[float]]:
    """d sum(values) / d logprobs, rows of T numbers (padding included)."""
    (grad,) = torch.autograd.grad(values_B.sum(), batch.logprobs_BT)
    return grad.tolist()


def loss_and_gradient(batch: LossBatch, terms: LossTerms) -> tuple[list[float], list[list[float]]]:
    """Loss per response, and its gradient with respect to every log-probability."""
    return terms.loss_B.tolist(), gradient(batch, terms.loss_B)
