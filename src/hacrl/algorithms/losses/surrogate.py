"""The clipped surrogate objective that every method uses for own responses."""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.algorithms.clipping import clip_own


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return min(s * A, clip(s) * A), and where the clipped side is chosen and there is no gradient."""
    unclipped = ratio * advantages
    clipped = clip_own(ratio, clip_low, clip_high) * advantages
    return torch.minimum(unclipped, clipped), unclipped.detach() > clipped.detach()
