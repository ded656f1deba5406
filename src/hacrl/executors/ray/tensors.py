"""Tensors on their way between processes of a cluster: bytes that Ray shares without copying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes; Ray keeps the array outside the pickled record."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @classmethod
    def of(cls, tensor: Tensor) -> PackedTensor:
        """Pack a tensor, of any device and type."""
        host = tensor.detach().cpu().contiguous()
        data = host.flatten().view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
        return cls(str(host.dtype).removeprefix("torch."), tuple(host.shape), data)

    def unpack(self) -> Tensor:
        """Return the tensor on the CPU, copied: arrays that Ray shares are read-only."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        if not self.data.size:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self.data.copy()).view(dtype).reshape(self.shape)
