"""The clipped surrogate that own responses share in every method."""

from __future__ import annotations

import torch
from torch import Tensor

from hacrl.algorithms.clipping import clip_own


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """min(s * A, clip(s) * A), and where the clipped side is chosen, i.e. where there is no gradient."""
    plain = ratio * advantages
    clipped = clip_own(ratio, clip_low, clip_high) * advantages
    return torch.minimum(plain, clipped), plain.detach() > clipped.detach()
