"""A fingerprint of a model's weights: cheap, and equal wherever and however the model was loaded."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

SAMPLED = 1024  # numbers of each tensor, evenly spaced: training changes nearly all of them


@torch.no_grad()
def weights_fingerprint(model: Any) -> str:
    """Return a hash of names, shapes and sampled numbers of all weights, rounded to bfloat16.

    The rounding makes it independent of the precision that the model was loaded in.
    """
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().reshape(-1)
        sampled = flat[:: -(-flat.numel() // SAMPLED) or 1].to("cpu").to(torch.bfloat16)
        digest.update(f"{name}\x1f{tuple(weight.shape)}\x1f".encode())
        digest.update(sampled.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
