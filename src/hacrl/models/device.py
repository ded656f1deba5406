"""Choose and check devices, copy to and from them without waiting, recover when their memory runs out."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.errors import ConfigError


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Within the block, kernels, recorded graphs and streams that name no GPU are this one's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Download:
    """Tensors as they are after all that the device has been asked so far, on their way here.

    An ordinary copy would come behind whatever the device has been asked by the time of reading.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """All are on the same device."""
        device = tensors[0].device
        self._here = tuple(tensor.detach().to("cpu", non_blocking=True) for tensor in tensors)
        self._arrived: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(device))  # the current device may be another

    def wait(self) -> tuple[Tensor, ...]:
        """In this machine's memory."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._here


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


def unused_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that are free at the moment, and all there are. Asks the driver, waits for nothing.

    What torch has reserved for later is this process's, but nobody's now: learning will use it again.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


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


def device_of(config: RunConfig, agent: AgentSettings) -> str:
    """The agent's own device, else the run's, else a GPU if there is one."""
    device = agent.device or config.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def check_device(device: str, key: str = "device") -> None:
    """Refuse a device this machine does not have; ``key`` is what the user wrote it under."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"{key}: {device!r} is not a device hacrl can use: auto, cpu, cuda or cuda:N")
    kind = torch.device(device)
    if kind.type == "cuda" and (
        not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"{key}: {device!r} is not there (this machine has {torch.cuda.device_count()} CUDA devices); "
            "use cpu, or leave it out"
        )
