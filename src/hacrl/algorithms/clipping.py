"""Asymmetric and stepwise clipping (eq. 13, 14).

Own responses are clipped around 1, as in GSPO. Cross-agent responses are clipped to
``[1 - delta + u * delta_step, upper]`` with upper = 1: never up-weighted, and held to a tighter lower
bound with every update u already made in the step. Outside the interval they carry no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


ROUNDING = 1e-9  # an interval narrower than this is empty but for rounding


def stepwise_lower_bound(delta: float, delta_step: float, updates_done: int) -> float:
    """1 - delta + u * delta_step (eq. 14)."""
    return 1.0 - delta + updates_done * delta_step


def check_schedule(delta: float, delta_step: float, upper: float, updates_per_step: int) -> None:
    """Refuse a schedule whose interval becomes empty before the step's last update."""
    bounds = [stepwise_lower_bound(delta, delta_step, u) for u in range(updates_per_step)]
    usable = sum(bound < upper - ROUNDING for bound in bounds)
    if usable == updates_per_step:
        return
    last_bound = bounds[-1]
    largest = (upper - 1.0 + delta) / max(updates_per_step - 1, 1)
    raise ValueError(
        f"the cross-agent clip interval [1 - delta + u * delta_step, upper] is empty from update "
        f"{usable + 1} of {updates_per_step} on (delta={delta}, delta_step={delta_step}, upper={upper}, "
        f"last lower bound {last_bound:.4g}): use delta_step below {largest:.4g}, a larger "
        "delta, or fewer updates per step"
    )


def clip_cross_agent(ratio_B: Tensor, lower: float, upper: float) -> Tensor:
    """clip(s) for other agents' responses; no gradient outside [lower, upper] (eq. 13)."""
    return ratio_B.clamp(lower, upper)


def clip_own(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """clip(s, 1 - eps_low, 1 + eps_high) for the learner's own responses."""
    return ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
