"""Sequence-level importance ratios and exponential importance sampling (eq. 11, 12).

s    = ( pi_k(y) / pi_j_old(y) )^(1/|y|)
s~   = s * stopgrad(s)^alpha                  for responses of another agent
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.types import LossBatch, RatioLength

# exp(±20) is far outside every clip interval; the bound only keeps the ratio and its gradient finite.
MAX_LOG_RATIO = 20.0


def sequence_ratio(batch: LossBatch, length: RatioLength = "source") -> Tensor:
    """Return s per response, (B,) (eq. 11).

    length="source": the log-likelihood ratio of the text, divided by the source's token count (the paper).
    length="own": the difference of two means over tokens, each in its own token space (the public code).
    Both agree if learner and source share a tokenizer.
    """
    logprob_B = batch.logprobs_BT.masked_fill(~batch.mask_BT, 0.0).sum(dim=-1)
    if length == "source":
        log_ratio_B = (logprob_B - batch.behaviour_logprob_B) / batch.source_length_B
    else:
        own_length_B = batch.mask_BT.sum(dim=-1)
        log_ratio_B = logprob_B / own_length_B - batch.behaviour_logprob_B / batch.source_length_B
    return log_ratio_B.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_ratio(batch: LossBatch) -> Tensor:
    """Return pi_k / pi_k_old per token, (B, T); 1 where the mask is off."""
    log_ratio_BT = (batch.logprobs_BT - batch.behaviour_logprobs_BT).masked_fill(~batch.mask_BT, 0.0)
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def exponential_weight(ratio_B: Tensor, alpha: float) -> Tensor:
    """Return stopgrad(s)^alpha (eq. 12): a response that the learner finds less likely counts less."""
    return torch.pow(ratio_B.detach(), alpha)
