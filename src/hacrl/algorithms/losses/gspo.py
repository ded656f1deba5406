"""GSPO: sequence-level, length-normalised ratio."""

from __future__ import annotations

from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.settings import MethodSettings
from hacrl.types import LossBatch, LossTerms, RatioLength


def gspo_loss(batch: LossBatch, settings: MethodSettings, ratio_length: RatioLength = "source") -> LossTerms:
    """- min(s A, clip(s) A)."""
    ratio_B = sequence_ratio(batch, ratio_length)
    objective_B, clipped_B = clipped_surrogate(
        ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high
    )
    return LossTerms(loss_B=-objective_B, ratio_B=ratio_B.detach(), clipped_B=clipped_B.float())
