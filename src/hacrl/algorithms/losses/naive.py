"""Naive sharing: the GSPO loss on everybody's responses, as if they were the learner's own."""

from __future__ import annotations

from hacrl.algorithms.losses.gspo import gspo_loss
from hacrl.config.schema import NaiveSettings
from hacrl.types import LossBatch, LossTerms


def naive_loss(batch: LossBatch, settings: NaiveSettings) -> LossTerms:
    """- min(s A, clip(s) A), whoever wrote the response."""
    return gspo_loss(batch, settings, settings.ratio_length)
