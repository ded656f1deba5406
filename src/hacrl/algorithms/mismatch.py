"""Truncated importance weights for a sampler whose numerics are not the learner's (not in the paper).

At the same weights, an inference engine and the learner's forward pass give a response different
probabilities, pi_sampler(y) and pi_old(y). Per token they may differ by more than the clip range is wide. So
the importance ratio is taken to pi_old: then clipping sees only the effect of updates. Own responses, which
were sampled from pi_sampler, are weighted without a gradient by

w   = min( pi_old(y) / pi_sampler(y), C )        sequence-level losses: the product over all tokens
w_t = min( pi_old(y_t) / pi_sampler(y_t), C )    token-level loss

Below the cap, w is exact: E_sampler[ w f(y) ] = E_old[ f(y) ]. The token weight w_t ignores the rest of the
response. It is exact only for responses of one token, but its variance does not grow with their length.
Other agents' responses have weight 1, because their ratio is taken to pi_sampler itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.algorithms.importance import MAX_LOG_RATIO
from hacrl.types import LossBatch


@dataclass(frozen=True, slots=True)
class MismatchWeight:
    """The weights w per response, (B,), or w_t per token, (B, T); without a gradient."""

    value: Tensor
    is_capped: Tensor  # bool: the ratio is above the cap


def sequence_weight(batch: LossBatch) -> MismatchWeight:
    """Return w, (B,); 1 if the batch has no sampler log-probabilities."""
    return _truncated(_log_mismatch(batch).sum(dim=-1), batch.mismatch_cap)


def token_weight(batch: LossBatch) -> MismatchWeight:
    """Return w_t, (B, T); 1 where the mask is off or the batch has no sampler log-probabilities."""
    return _truncated(_log_mismatch(batch), batch.mismatch_cap)


def _log_mismatch(batch: LossBatch) -> Tensor:
    """Return log pi_old - log pi_sampler of own tokens, 0 elsewhere; (B, T)."""
    if batch.sampler_logprobs_BT is None:
        return torch.zeros_like(batch.behaviour_logprobs_BT)
    own_BT = batch.mask_BT & batch.is_own_B.unsqueeze(-1)
    log_BT = (batch.behaviour_logprobs_BT - batch.sampler_logprobs_BT).detach()
    return log_BT.masked_fill(~own_BT, 0.0)


def _truncated(log_weight: Tensor, cap: float) -> MismatchWeight:
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return MismatchWeight(weight.clamp(max=cap), weight > cap)
