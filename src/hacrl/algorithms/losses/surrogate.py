"""The clipped surrogate objective that every method uses for own responses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hacrl.algorithms.clipping import clip_own


class ClippedObjective(NamedTuple):
    """An objective, and where clipping removes its gradient because the ratio is too low or too high."""

    objective: Tensor
    below: Tensor  # bool
    above: Tensor  # bool


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> ClippedObjective:
    """Return min(s * A, clip(s) * A), and where the clipped side is chosen and there is no gradient."""
    unclipped = ratio * advantages
    clipped = clip_own(ratio, clip_low, clip_high) * advantages
    has_no_gradient = unclipped.detach() > clipped.detach()
    # the clipped side is chosen for a low ratio if A < 0, for a high ratio if A > 0
    below = has_no_gradient & (advantages < 0)
    return ClippedObjective(torch.minimum(unclipped, clipped), below, has_no_gradient & ~below)
