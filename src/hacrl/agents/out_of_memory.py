"""Running out of memory and going on: telling it from other errors, and letting go of what is still held."""

from __future__ import annotations

import gc
import traceback

import torch

# Where torch has no type of its own for it: a matrix product's workspace, and memory that is no GPU's.
_SAID_OTHERWISE = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator", "MPS backend out of memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether less work at once could have gone well."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in _SAID_OTHERWISE)


def let_go(error: BaseException, device: torch.device) -> None:
    """Free what the failed attempt has left: the frames an error remembers hold its tensors.

    To be called by whoever catches the error, with the attempt in a function of its own.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    gc.collect()  # hooks and caches may point back at what holds them
    if device.type == "cuda":
        torch.cuda.empty_cache()
