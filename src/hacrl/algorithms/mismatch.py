"""Truncated importance weights for a sampler whose numerics are not the learner's (not in the paper).

At the same weights an inference engine gives a response another probability, pi_sampler(y), than the
learner's forward pass, pi_old(y), by more per token than the clip range is wide. So the ratio is taken to
pi_old, which leaves to the clip what the updates did, and own responses, which came from pi_sampler, get

w   = min( pi_old(y) / pi_sampler(y), C )        sequence-level losses: the product over all tokens
w_t = min( pi_old(y_t) / pi_sampler(y_t), C )    token-level loss

without a gradient. Below the cap w is exact: E_sampler[ w f(y) ] = E_old[ f(y) ]. w_t leaves out the rest
of the response: it is exact for responses of one token only, but does not grow noisier with their length.
Others' responses have weight 1: what their source sampled with is the policy they are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.algorithms.importance import MAX_LOG_RATIO
from hacrl.types import LossBatch


@dataclass(frozen=True, slots=True)
class MismatchWeight:
    """w per response, (B,), or w_t per token, (B, T); without a gradient."""

    value: Tensor
    is_capped: Tensor  # bool: the ratio is above the cap


def sequence_weight(batch: LossBatch) -> MismatchWeight:
    """w, (B,); 1 if there is nothing to correct."""
    return _truncated(_log_mismatch(batch).sum(dim=-1), batch.mismatch_cap)


def token_weight(batch: LossBatch) -> MismatchWeight:
    """w_t, (B, T); 1 if there is nothing to correct, and where the mask is off."""
    return _truncated(_log_mismatch(batch), batch.mismatch_cap)


def _log_mismatch(batch: LossBatch) -> Tensor:
    """log pi_old - log pi_sampler of own tokens, 0 elsewhere; (B, T)."""
    if batch.sampler_logprobs_BT is None:
        return torch.zeros_like(batch.behaviour_logprobs_BT)
    own_BT = batch.mask_BT & batch.is_own_B.unsqueeze(-1)
    log_BT = (batch.behaviour_logprobs_BT - batch.sampler_logprobs_BT).detach()
    return log_BT.masked_fill(~own_BT, 0.0)


def _truncated(log_weight: Tensor, cap: float) -> MismatchWeight:
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return MismatchWeight(weight.clamp(max=cap), weight > cap)
