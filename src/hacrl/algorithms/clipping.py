"""Asymmetric and stepwise clipping (eq. 13, 14).

Ratios of own responses are clipped around 1, as in GSPO. Ratios of other agents' responses are clipped to
``[1 - delta + u * delta_step, upper]`` with upper = 1. So other agents' responses are never weighted up, and
the lower bound rises with the number u of updates already made in the step. A ratio outside the interval
carries no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def stepwise_lower_bound(delta: float, delta_step: float, updates_done: int) -> float:
    """Return 1 - delta + u * delta_step, the lower bound after u updates of the step (eq. 14)."""
    return 1.0 - delta + updates_done * delta_step


def clip_cross_agent(ratio_B: Tensor, lower: float, upper: float) -> Tensor:
    """Return clip(s) for other agents' responses; no gradient outside [lower, upper] (eq. 13)."""
    return ratio_B.clamp(lower, upper)


def clip_own(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return clip(s, 1 - eps_low, 1 + eps_high) for the learner's own responses."""
    return ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
