"""GRPO: token-level importance ratio; also with the aggregation of DAPO or Dr. GRPO."""

from __future__ import annotations

from hacrl.algorithms.aggregation import length_normaliser
from hacrl.algorithms.importance import sequence_ratio, token_ratio
from hacrl.algorithms.losses.surrogate import clipped_surrogate
from hacrl.algorithms.mismatch import token_weight
from hacrl.config.schema import GrpoSettings
from hacrl.types import LossBatch, LossTerms


def grpo_loss(batch: LossBatch, settings: GrpoSettings) -> LossTerms:
    """Return - 1/N sum_t w_t min(r_t A, clip(r_t) A) per response.

    N is |y|, or another length by ``settings.aggregation``. w_t is 1 unless the sampler's numerics are
    corrected for.
    """
    ratio_BT = token_ratio(batch)
    advantages_B1 = batch.advantages_B.unsqueeze(-1)
    clipped = clipped_surrogate(ratio_BT, advantages_B1, settings.clip_low, settings.clip_high)
    length_B = batch.mask_BT.sum(dim=-1)
    weight = token_weight(batch)
    return LossTerms(
        loss_B=-(weight.value * clipped.objective * batch.mask_BT).sum(dim=-1)
        / length_normaliser(batch, settings.aggregation),
        ratio_B=sequence_ratio(batch).detach(),
        clipped_below_B=(clipped.below & batch.mask_BT).sum(dim=-1) / length_B,
        clipped_above_B=(clipped.above & batch.mask_BT).sum(dim=-1) / length_B,
        weight_B=(weight.value * batch.mask_BT).sum(dim=-1) / length_B,
        capped_B=(weight.is_capped & batch.mask_BT).sum(dim=-1) / length_B,
    )
