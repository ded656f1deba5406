"""Choose and check devices, copy to and from them asynchronously, and recover from out-of-memory errors."""

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


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` torch's current GPU within the block, e.g. for CUDA graphs and streams."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class HostCopy:
    """An asynchronous copy of tensors to the CPU, queued behind all work that the device has at this moment.

    An ordinary copy at the time of reading would be queued behind later work, too.
    """

    def __init__(self, *tensors: Tensor) -> None:
        """Start to copy the tensors, which must all be on the same device."""
        device = tensors[0].device
        self._copies = tuple(tensor.detach().to("cpu", non_blocking=True) for tensor in tensors)
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(device))  # torch's current device may be another

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until the copy is done and return the CPU tensors."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies


def copy_to_device(
    values: Tensor | Sequence[int] | Sequence[float] | Sequence[bool],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copy values to a device, asynchronously if it is a GPU, and return the tensor there.

    An ordinary copy to a GPU would block Python until the GPU has done all queued work. A copy from pinned
    memory is queued instead; torch does not reuse the pinned memory before the copy is done.
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def unused_memory(device: torch.device) -> tuple[int, int]:
    """Return a GPU's free bytes and its total bytes, without synchronizing with it.

    Memory that torch's allocator has reserved but does not use counts as free: learning can use it.
    """
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total


# Messages of out-of-memory errors that are not torch.OutOfMemoryError.
_OUT_OF_MEMORY_MESSAGES = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator", "MPS backend out of memory")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out, so that the same work in smaller pieces could succeed."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)


def free_failed_attempt(error: BaseException, device: torch.device) -> None:
    """Free the tensors of a failed attempt, which the frames of the error's traceback still hold.

    Call this where the error is caught. The attempt must have run in a function of its own.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__
    gc.collect()  # hooks and caches may form reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()


def agent_device(config: RunConfig, agent: AgentSettings) -> str:
    """Return the agent's own device, else the run's. Resolve "auto" to a GPU if there is one."""
    device = agent.device or config.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def rank_devices(device: str, ranks: int) -> list[str]:
    """Return the devices of an agent's ranks, the first of which is on ``device``: GPUs follow each other."""
    if ranks == 1:
        return ["cuda:0" if device == "cuda" else device]
    if not device.startswith("cuda"):
        return [device] * ranks
    first = int(device.partition(":")[2] or 0)
    return [f"cuda:{first + rank}" for rank in range(ranks)]


def check_device(device: str, key: str = "device") -> None:
    """Raise ConfigError for a device that this machine does not have; ``key`` is its configuration key."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"{key}: {device!r} is not a device hacrl can use: auto, cpu, cuda or cuda:N")
    kind = torch.device(device)
    if kind.type == "cuda" and (
        not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"{key}: there is no {device!r} (this machine has {torch.cuda.device_count()} CUDA devices); "
            "use cpu, or leave it out"
        )
