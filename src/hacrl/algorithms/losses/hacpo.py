"""HACPO (eq. 47-53): GSPO on own responses; exponential, stepwise-clipped ratios on other agents'."""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.algorithms.clipping import clip_cross_agent, stepwise_lower_bound
from hacrl.algorithms.importance import exponential_weight, sequence_ratio
from hacrl.algorithms.losses.surrogate import ClippedObjective, clipped_surrogate
from hacrl.algorithms.mismatch import sequence_weight
from hacrl.config.schema import HacpoSettings
from hacrl.types import LossBatch, LossTerms


def hacpo_loss(batch: LossBatch, settings: HacpoSettings) -> LossTerms:
    """Return minus J_homo for own responses, and minus J_hete for other agents' responses."""
    ratio_B = sequence_ratio(batch, settings.choices.ratio_length)
    own = clipped_surrogate(ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high)
    # Own rows are set to 1: torch.where would multiply an overflow in the unused branch by 0, which is NaN.
    cross_ratio_B = ratio_B.masked_fill(batch.is_own_B, 1.0)
    cross = cross_agent_surrogate(cross_ratio_B, batch.advantages_B, batch.updates_done, settings)
    weight = sequence_weight(batch)  # 1 for other agents' responses
    return LossTerms(
        loss_B=-weight.value * torch.where(batch.is_own_B, own.objective, cross.objective),
        ratio_B=ratio_B.detach(),
        clipped_below_B=torch.where(batch.is_own_B, own.below, cross.below).float(),
        clipped_above_B=torch.where(batch.is_own_B, own.above, cross.above).float(),
        weight_B=weight.value,
        capped_B=weight.is_capped.float(),
    )


def cross_agent_surrogate(
    ratio_B: Tensor, advantages_B: Tensor, updates_done: int, settings: HacpoSettings
) -> ClippedObjective:
    """Return clip(s) * stopgrad(clip(s))^alpha * A~, and where clipping removes the gradient; (B,) each.

    Unlike the surrogate of own responses, there is no ``min`` with the unclipped side.
    """
    if not settings.cross_clip:
        weight_B = exponential_weight(ratio_B, settings.alpha)
        never_B = torch.zeros_like(ratio_B, dtype=torch.bool)
        return ClippedObjective(ratio_B * weight_B * advantages_B, never_B, never_B)
    lower = stepwise_lower_bound(settings.delta, settings.delta_step, updates_done)
    clipped_ratio_B = clip_cross_agent(ratio_B, lower, settings.cross_upper)
    weight_B = exponential_weight(clipped_ratio_B, settings.alpha)
    below_B, above_B = ratio_B.detach() < lower, ratio_B.detach() > settings.cross_upper
    return ClippedObjective(clipped_ratio_B * weight_B * advantages_B, below_B, above_B)
