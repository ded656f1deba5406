"""GSPO: sequence-level, length-normalised importance ratio."""

from __future__ import annotations

from hacrl.algorithms.aggregation import weighed_by_length
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.mismatch import sequence_weight
from hacrl.config.schema import MethodSettings
from hacrl.types import LossBatch, LossTerms, RatioLength


def gspo_loss(batch: LossBatch, settings: MethodSettings, ratio_length: RatioLength = "source") -> LossTerms:
    """Return - w min(s A, clip(s) A) per response; w is 1 unless the sampler's numerics are corrected for.

    With another ``settings.aggregation`` than ``response``, every token of the response counts with it.
    """
    ratio_B = sequence_ratio(batch, ratio_length)
    clipped = clipped_surrogate(ratio_B, batch.advantages_B, settings.clip_low, settings.clip_high)
    weight = sequence_weight(batch)
    return LossTerms(
        loss_B=weighed_by_length(-weight.value * clipped.objective, batch, settings.aggregation),
        ratio_B=ratio_B.detach(),
        clipped_below_B=clipped.below.float(),
        clipped_above_B=clipped.above.float(),
        weight_B=weight.value,
        capped_B=weight.is_capped.float(),
    )
