"""How the tokens of a mini-batch are weighed in its loss. ``l_t`` is the loss of one token.

response    1/|y| sum_t l_t    every response counts as much (GRPO, arXiv 2402.03300)
token       1/m   sum_t l_t    every token counts as much; m: mean |y| of the mini-batch (DAPO, 2503.14476)
constant    1/L   sum_t l_t    as token, but without a factor that depends on the responses; L: the longest
                               response there can be (Dr. GRPO, 2503.20783)

The learner takes the mean over all responses of the mini-batch. So ``token`` is the sum over all tokens of
the mini-batch divided by their number, however the mini-batch is cut into micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from hacrl.config.schema import Aggregation
    from hacrl.types import LossBatch


def length_normaliser(batch: LossBatch, aggregation: Aggregation) -> Tensor:
    """Return what the sum over a response's tokens is divided by, (B,)."""
    length_B = batch.mask_BT.sum(dim=-1)
    if aggregation == "response":
        return length_B
    divisor = batch.mean_tokens if aggregation == "token" else batch.max_tokens
    assert divisor is not None, f"the aggregation {aggregation!r} needs the lengths of the mini-batch"
    return torch.full_like(length_B, divisor, dtype=batch.logprobs_BT.dtype)


def weighed_by_length(value_B: Tensor, batch: LossBatch, aggregation: Aggregation) -> Tensor:
    """Return a mean over a response's tokens, or a number that all of them share, as aggregated; (B,)."""
    if aggregation == "response":
        return value_B
    return value_B * batch.mask_BT.sum(dim=-1) / length_normaliser(batch, aggregation)
