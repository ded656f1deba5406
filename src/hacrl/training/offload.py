"""Offload tensors from a device to the machine's memory, and reload them.

An offloaded tensor stays the same Python object: only its memory changes, to ordinary memory of the CPU. So
optimizers and modules need not know about it. Copies run asynchronously beside the device's computation.
Before anything reads or writes the tensors, the owner calls :meth:`OffloadGroup.wait_on_device` for use on
the device or :meth:`OffloadGroup.wait` for use on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hacrl.errors import TrainingError

# Bytes. torch hands out pinned memory in powers of two, so tensors share chunks of such a size.
HOST_CHUNK = 2**30
ALIGNMENT = 512  # bytes: a tensor begins at a multiple of this within a chunk


@dataclass(frozen=True)
class Copy:
    """One copy: from ``source`` to ``target``."""

    source: Tensor
    target: Tensor


class PendingCopies(Protocol):
    """Copies that have been started and may not have finished."""

    def wait_on_device(self) -> None:
        """Make all later work of the device wait for the copies. Return at once."""
        ...

    def wait(self) -> None:
        """Return when the copies are finished."""
        ...


class Transfers(Protocol):
    """Starts copies between one device and the machine's memory.

    ``after`` are earlier copies of the same tensors: the new ones start when those have finished.
    ``caller_holds_memory``: the caller keeps the device's side of the copies alive until it has called
    :meth:`PendingCopies.wait_on_device`.
    """

    device: torch.device

    def allocate_host(self, size: int) -> Tensor:
        """Return ``size`` bytes of the machine's memory."""
        ...

    def to_host(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        """Start to copy from the device. Unless the caller holds them, sources may be freed at once."""
        ...

    def to_device(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        """Start to copy into device memory that was just allocated."""
        ...


class _CudaPendingCopies:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self.event = event

    def wait_on_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaTransfers:
    """Copies between a GPU and pinned memory, with one CUDA stream for each direction.

    Device memory is allocated on the stream that computes, which can reuse it for anything once it is free.
    ``record_stream`` keeps the allocator from handing it out while a copy still needs it. Memory that the
    caller holds does not need ``record_stream``: the caller frees it only for work that runs after the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate_host(self, size: int) -> Tensor:
        """Return ``size`` bytes of pinned memory: copies of pageable memory would block the CPU."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TrainingError(
                f"the machine has no {size / 2**30:.2f} GiB of memory left to pin for tensors offloaded from "
                f"{self.device}: set learning.offload=never (or weights instead of all, stream instead of "
                "weights) or agents.NAME.lora, or use a machine with more memory"
            ) from error

    def to_host(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        """Start to copy from the GPU."""
        to_record = [] if caller_holds_memory else [copy.source for copy in copies]
        return self._copy(copies, after, self._to_host, to_record)

    def to_device(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        """Start to copy to the GPU."""
        to_record = [] if caller_holds_memory else [copy.target for copy in copies]
        return self._copy(copies, after, self._to_device, to_record)

    def _copy(
        self,
        copies: Sequence[Copy],
        after: PendingCopies | None,
        stream: torch.cuda.Stream,
        to_record: Sequence[Tensor],
    ) -> PendingCopies:
        # The copies wait for the work queued so far: the last update of tensors to offload, or the last use
        # of memory that the allocator has just handed out for tensors to reload.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if isinstance(after, _CudaPendingCopies):  # in the other direction, on another stream
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
            for tensor in to_record:
                tensor.record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _CudaPendingCopies(self.device, event)


# Returns one tensor in the machine's memory for each given one, of the same shape, strides and type.
HostBuffers = Callable[[Sequence[Tensor]], list[Tensor]]


class OffloadGroup:
    """Tensors of one owner that are offloaded and reloaded together. Their host buffers are kept for reuse.

    ``hold_memory``: device memory of offloaded tensors becomes free when the owner calls :meth:`release`, not
    when the copy has finished. Then Python, which runs ahead of the device, need not wait for copies before
    it allocates.
    """

    def __init__(
        self, transfers: Transfers, host_buffers: HostBuffers | None = None, *, hold_memory: bool = False
    ) -> None:
        self.is_offloaded = False
        self._hold_memory = hold_memory
        self._held: list[Tensor] = []  # device memory of offloaded tensors that is not released yet
        self._transfers = transfers
        self._host_buffers = host_buffers or HostAllocator(transfers.allocate_host).buffers_like
        self._tensors: list[Tensor] = []  # every tensor that was ever offloaded
        self._hosts: list[Tensor] = []  # the host buffer of each
        self._pending: PendingCopies | None = None  # the last copies; each waits for the ones before

    @property
    def host_bytes(self) -> int:
        """Bytes of the machine's memory that were allocated for the host buffers."""
        storages = [host.untyped_storage() for host in self._hosts]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @torch.no_grad()
    def offload(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy the tensors to the host. Their device memory is free when the copies have finished.

        Tensors may be added from call to call, never removed.
        """
        if self.is_offloaded:
            return
        self._add_host_buffers(tensors)
        copies = [Copy(tensor.data, host) for tensor, host in zip(self._tensors, self._hosts, strict=True)]
        self._pending = self._transfers.to_host(copies, self._pending, caller_holds_memory=self._hold_memory)
        self._held = [copy.source for copy in copies] if self._hold_memory else []
        self._set_memory(self._hosts, is_offloaded=True)

    @torch.no_grad()
    def reload(self) -> None:
        """Start to copy the tensors back. If device memory runs out, all tensors stay offloaded."""
        if not self.is_offloaded:
            return
        self.release()
        targets = self._allocate_on_device()
        copies = [Copy(host, target) for host, target in zip(self._hosts, targets, strict=True)]
        self._pending = self._transfers.to_device(
            copies, self._pending, caller_holds_memory=self._hold_memory
        )
        self._set_memory(targets, is_offloaded=False)

    @torch.no_grad()
    def discard(self, tensors: Sequence[Tensor]) -> None:
        """Free the tensors' device memory without a copy: their numbers are lost."""
        if not self.is_offloaded:
            self.wait_on_device()  # a copy may still be writing into that memory
            self._add_host_buffers(tensors)
            self._set_memory(self._hosts, is_offloaded=True)

    @torch.no_grad()
    def allocate(self) -> None:
        """Give offloaded tensors device memory without a copy: their numbers are undefined."""
        if self.is_offloaded:
            self.release()
            self._set_memory(self._allocate_on_device(), is_offloaded=False)

    def release(self) -> None:
        """Free the held device memory for later work of the device."""
        if self._held:
            self.wait_on_device()
            self._held = []

    def wait_on_device(self) -> None:
        """Make all later work of the device wait for the copies. Return at once."""
        if self._pending is not None:
            self._pending.wait_on_device()

    def wait(self) -> None:
        """Return when the copies are finished."""
        if self._pending is not None:
            self._pending.wait()

    def _set_memory(self, memories: Sequence[Tensor], is_offloaded: bool) -> None:
        for tensor, memory in zip(self._tensors, memories, strict=True):
            tensor.data = memory
        self.is_offloaded = is_offloaded

    def _allocate_on_device(self) -> list[Tensor]:
        device = self._transfers.device
        return [
            torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
            for host in self._hosts
        ]

    def _add_host_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Make host buffers for new tensors, e.g. the moments, which exist from the first update on."""
        known = {id(tensor) for tensor in self._tensors}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        assert len(new) + len(known) == len(tensors), "tensors may be added to a group, never removed"
        if new:
            self._hosts += self._host_buffers(new)
            self._tensors += new


class HostAllocator:
    """Places host buffers side by side in a few large chunks. The rest of a chunk is used by later buffers.

    ``allocate`` returns a chunk of the given size in bytes. ``expected``: bytes of all buffers to come, if
    that is known.
    """

    def __init__(self, allocate: Callable[[int], Tensor], expected: int = 0) -> None:
        self._allocate = allocate
        self._expected = expected
        self._free: list[Tensor] = []  # the unused rest of each chunk

    def buffers_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a buffer of the same shape, strides and type for each tensor."""
        sizes = [_aligned(_extent(tensor) * tensor.element_size()) for tensor in tensors]
        remaining = max(sum(sizes), self._expected)
        buffers: dict[int, Tensor] = {}
        for index in sorted(range(len(tensors)), key=lambda i: sizes[i], reverse=True):
            tensor, size = tensors[index], sizes[index]
            number = next((i for i, chunk in enumerate(self._free) if len(chunk) >= size), None)
            if number is None:
                number = len(self._free)
                self._free.append(self._allocate(_power_of_two(max(size, min(remaining, HOST_CHUNK)))))
            memory, self._free[number] = self._free[number][:size], self._free[number][size:]
            flat = memory[: _extent(tensor) * tensor.element_size()].view(tensor.dtype)
            buffers[index] = flat.as_strided(tensor.size(), tensor.stride())
            remaining -= size
        self._expected = max(0, self._expected - sum(sizes))
        return [buffers[index] for index in range(len(tensors))]


def _extent(tensor: Tensor) -> int:
    """Return the count of numbers from the tensor's first to its last in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
