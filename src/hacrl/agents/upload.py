"""Numbers handed to a device that goes on with what it is doing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Tensor | Sequence[int] | Sequence[float] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The same numbers there, for whatever is asked of the device next; a GPU is not waited for.

    An ordinary copy begins when a GPU has done all that it was asked before, and Python stands still till
    then. Pinned memory is copied when its turn comes; torch does not reuse it before.
    """
    here = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)
