"""The GPU that is meant where none is named."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Within the block, kernels, recorded graphs and streams that name no GPU are this one's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
