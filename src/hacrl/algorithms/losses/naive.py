"""Naive sharing: the GSPO loss on all agents' responses, as if they were the learner's own."""

from __future__ import annotations

from hacrl.algorithms.losses.gspo import gspo_loss
from hacrl.config.schema import NaiveSettings
from hacrl.types import LossBatch, LossTerms


def naive_loss(batch: LossBatch, settings: NaiveSettings) -> LossTerms:
    """Return - w min(s A, clip(s) A) per response, whichever agent wrote it."""
    return gspo_loss(batch, settings, settings.choices.ratio_length)
