"""F-TIS, filtered truncated importance sampling, arXiv 2605.22537.

    J_hete = 1/|y| sum_t  sg[min(pi_k(y_t) / pi_j(y_t), C)] * A' * pi_k(y_t) / sg[pi_k(y_t)]
    A'     = A    if A > 0 or KL < g,    else 0

Importance weights of others' tokens are truncated at C and carry no gradient. A response with a negative
advantage from which the learner is far away is filtered: pushing away from what one would never write moves
probability to anything at all. Filtered rewards stay in the baseline. Advantages compare a response with
those of its own source ("vertical" in the paper), not with all agents'.

Assumptions: one tokenizer; sources near enough for token weights to mean something.

Our reading. KL is log pi_j(y) - log pi_k(y), the one-sample estimate over the whole response. Own responses
keep GSPO's objective; with one update per step both are the same but for the length of the ratio. Where
tokenizers differ there are no token weights, and all tokens get min(s, C), s being the sequence ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.algorithms.advantage import (
    Advantages,
    CapabilityRatio,
    Normaliser,
    PromptRewards,
    group_relative_by_source,
)
from hacrl.algorithms.importance import sequence_ratio, token_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.mismatch import sequence_weight
from hacrl.config.rules import FtisSettings
from hacrl.types import LossBatch, LossTerms


def advantages(
    _: FtisSettings, normaliser: Normaliser, rewards: PromptRewards, __: str, ___: CapabilityRatio
) -> Advantages:
    """Return every response's advantage among the responses of its own source."""
    return group_relative_by_source(rewards, normaliser)


def loss(batch: LossBatch, settings: FtisSettings) -> LossTerms:
    """Return GSPO's loss of own responses, and minus J_hete of others'."""
    ratio_B = sequence_ratio(batch, settings.choices.ratio_length)
    own = clipped_surrogate(ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high)
    is_filtered_B = _divergence(batch) >= settings.filter_kl
    is_filtered_B = is_filtered_B & (batch.advantages_B < 0) & ~batch.is_own_B
    advantages_B = batch.advantages_B.masked_fill(is_filtered_B, 0.0)
    weight_BT = _token_weights(batch, ratio_B.detach()).clamp(max=settings.weight_cap)
    # the policy over itself: 1, with the gradient of log pi_k; a filtered row may hold -inf
    finite_BT = batch.logprobs_BT.masked_fill(~batch.mask_BT | is_filtered_B.unsqueeze(-1), 0.0)
    score_BT = (finite_BT - finite_BT.detach()).exp()
    weighted_B = (weight_BT * score_BT * batch.mask_BT).sum(dim=-1) / batch.mask_BT.sum(dim=-1)
    cross_B = advantages_B * weighted_B
    weight = sequence_weight(batch)
    return LossTerms(
        loss_B=-weight.value * torch.where(batch.is_own_B, own.objective, cross_B),
        ratio_B=ratio_B.detach(),
        clipped_below_B=torch.where(batch.is_own_B, own.below, is_filtered_B).float(),
        clipped_above_B=(own.above & batch.is_own_B).float(),
        weight_B=weight.value,
        capped_B=weight.is_capped.float(),
    )


def _divergence(batch: LossBatch) -> Tensor:
    """Return log pi_j(y) - log pi_k(y), (B,)."""
    logprob_B = batch.logprobs_BT.detach().masked_fill(~batch.mask_BT, 0.0).sum(dim=-1)
    return batch.behaviour_logprob_B - logprob_B


def _token_weights(batch: LossBatch, ratio_B: Tensor) -> Tensor:
    """Return pi_k / pi_j per token, or s where the source's tokens are not known one by one; (B, T)."""
    known_BT = (batch.behaviour_logprobs_BT != 0) & batch.mask_BT
    is_sum_only_B = ~known_BT.any(dim=-1) & (batch.behaviour_logprob_B != 0)
    return torch.where(is_sum_only_B.unsqueeze(-1), ratio_B.unsqueeze(-1), token_ratio(batch).detach())
