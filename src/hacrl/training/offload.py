"""Tensors that leave their device for the machine's memory while nobody works with them, and come back.

A tensor stays the same object and only its memory changes, so optimizers and modules need not know; while it
is away, it is an ordinary tensor of the CPU. Copies run beside what the device computes. Who reads or writes
the tensors says so before: :meth:`Luggage.ready` for the device, :meth:`Luggage.wait` for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hacrl.errors import TrainingError

CHUNK = 2**30  # bytes: pinned memory is handed out in powers of two, so tensors share pieces of such a size
ALIGNED = 512  # where in a piece a tensor may begin


@dataclass(frozen=True)
class Copy:
    """What is copied where."""

    source: Tensor
    target: Tensor


class Copying(Protocol):
    """Copies under way."""

    def ready(self) -> None:
        """Whatever is asked of the device from now on happens after the copies; does not wait."""
        ...

    def wait(self) -> None:
        """Return when the copies are done."""
        ...


class Transfers(Protocol):
    """Moves tensors between a device and the machine's memory; ``after`` are copies of the same tensors.

    ``kept``: whoever asks keeps the device's side of the copies until it has asked them to be ready.
    """

    device: torch.device

    def host_memory(self, size: int) -> Tensor:
        """So many bytes of the machine's memory."""
        ...

    def leave(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        """Copy from the device; unless they are kept, the sources may be dropped at once."""
        ...

    def come_back(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        """Copy to the device, into memory that was just allocated."""
        ...


class _CudaCopying:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self.event = event

    def ready(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait(self) -> None:
        self.event.synchronize()


class CudaTransfers:
    """Between a GPU and pinned memory, both directions at once, on streams of their own.

    Device memory belongs to the stream of those who compute, so that they can use it for anything else once
    it is free; ``record_stream`` keeps the allocator from handing it out while a copy still needs it. What is
    kept needs no such thing: it is free for whatever is computed after the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._leaving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._coming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, size: int) -> Tensor:
        """Pinned, without which copies would not run beside anything."""
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise TrainingError(
                f"the machine has no {size / 2**30:.2f} GiB left to pin for what leaves {self.device}: "
                "set learning.offload=never (or weights instead of all, stream instead of weights) or "
                "agents.NAME.lora, or use a machine with more memory"
            ) from error

    def leave(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        """See :class:`Transfers`."""
        return self._copy(copies, after, self._leaving, [] if kept else [copy.source for copy in copies])

    def come_back(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        """See :class:`Transfers`."""
        return self._copy(copies, after, self._coming, [] if kept else [copy.target for copy in copies])

    def _copy(
        self,
        copies: Sequence[Copy],
        after: Copying | None,
        stream: torch.cuda.Stream,
        lent: Sequence[Tensor],
    ) -> Copying:
        # What was asked for before comes first: the last update of what leaves, and the last use of memory
        # that the allocator has just handed out for what comes back.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if isinstance(after, _CudaCopying):  # the other direction's, of the same tensors
            stream.wait_event(after.event)
        with torch.cuda.stream(stream):
            for copy in copies:
                copy.target.copy_(copy.source, non_blocking=True)
            for tensor in lent:
                tensor.record_stream(stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return _CudaCopying(self.device, event)


class Luggage:
    """Tensors of one owner that leave and come back together. Their place in the machine's memory is kept.

    ``lingers``: memory that they leave is free for others when the owner says so (:meth:`release`), not when
    the copy is done. Then Python, which runs ahead of the device, need not wait for copies to have room.
    """

    def __init__(self, transfers: Transfers, places: Places | None = None, *, lingers: bool = False) -> None:
        self.is_away = False
        self._lingers = lingers
        self._left: list[Tensor] = []  # memory that is not free yet
        self._transfers = transfers
        self._places: Places = places or HostPlaces(transfers.host_memory)
        self._tensors: list[Tensor] = []  # all that were ever taken along
        self._hosts: list[Tensor] = []  # where each of them goes
        self._copying: Copying | None = None  # the last one of all; each comes after the one before

    @property
    def host_bytes(self) -> int:
        """Of the machine's memory, as handed out."""
        return sum({host.untyped_storage().data_ptr(): _size(host) for host in self._hosts}.values())

    @torch.no_grad()
    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Begin to copy the tensors out; their device memory is free for others once that is done."""
        if self.is_away:
            return
        self._make_places(tensors)
        copies = [Copy(tensor.data, host) for tensor, host in zip(self._tensors, self._hosts, strict=True)]
        self._copying = self._transfers.leave(copies, self._copying, kept=self._lingers)
        self._left = [copy.source for copy in copies] if self._lingers else []
        self._put(self._hosts, away=True)

    @torch.no_grad()
    def come_back(self) -> None:
        """Begin to copy the tensors back. If there is no memory for them, all stay where they are."""
        if not self.is_away:
            return
        self.release()
        copies = [Copy(host, memory) for host, memory in zip(self._hosts, self._device_memory(), strict=True)]
        self._copying = self._transfers.come_back(copies, self._copying, kept=self._lingers)
        self._put([copy.target for copy in copies], away=False)

    @torch.no_grad()
    def drop(self, tensors: Sequence[Tensor]) -> None:
        """As if they left, but nothing is copied: what they held is lost."""
        if not self.is_away:
            self.ready()  # a copy may still be on its way into that memory
            self._make_places(tensors)
            self._put(self._hosts, away=True)

    @torch.no_grad()
    def renew(self) -> None:
        """As if they came back, but nothing is copied: what they hold is undefined."""
        if self.is_away:
            self.release()
            self._put(self._device_memory(), away=False)

    def release(self) -> None:
        """Whatever the device computes from now on may use the memory that lingering tensors have left."""
        if self._left:
            self.ready()
            self._left = []

    def ready(self) -> None:
        """What the device computes from now on finds the tensors whole."""
        if self._copying is not None:
            self._copying.ready()

    def wait(self) -> None:
        """Until the tensors are whole, wherever they are."""
        if self._copying is not None:
            self._copying.wait()

    def _put(self, memories: Sequence[Tensor], away: bool) -> None:
        for tensor, memory in zip(self._tensors, memories, strict=True):
            tensor.data = memory
        self.is_away = away

    def _device_memory(self) -> list[Tensor]:
        device = self._transfers.device
        return [
            torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
            for host in self._hosts
        ]

    def _make_places(self, tensors: Sequence[Tensor]) -> None:
        """For those not seen before: moments exist from the first update on only."""
        known = {id(tensor) for tensor in self._tensors}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        assert len(new) + len(known) == len(tensors), "luggage is never left behind"
        self._hosts += self._places.like(new)
        self._tensors += new


class Places(Protocol):
    """Places in the machine's memory."""

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A tensor of the same shape, strides and type for each."""
        ...


class HostPlaces:
    """Places for tensors side by side in a few pieces of memory; what is left of one is used later."""

    def __init__(self, allocate: Callable[[int], Tensor], expected: int = 0) -> None:
        self._allocate = allocate
        self._expected = expected  # bytes that will be asked for in all, if that is known
        self._pieces: list[Tensor] = []  # what is left of each

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Places`."""
        sizes = [_aligned(_extent(tensor) * tensor.element_size()) for tensor in tensors]
        left = max(sum(sizes), self._expected)
        places: dict[int, Tensor] = {}
        for index in sorted(range(len(tensors)), key=lambda which: sizes[which], reverse=True):
            tensor, size = tensors[index], sizes[index]
            number = next((i for i, piece in enumerate(self._pieces) if len(piece) >= size), None)
            if number is None:
                number = len(self._pieces)
                self._pieces.append(self._allocate(_power_of_two(max(size, min(left, CHUNK)))))
            taken, self._pieces[number] = self._pieces[number][:size], self._pieces[number][size:]
            flat = taken[: _extent(tensor) * tensor.element_size()].view(tensor.dtype)
            places[index] = flat.as_strided(tensor.size(), tensor.stride())
            left -= size
        self._expected = max(0, self._expected - sum(sizes))
        return [places[index] for index in range(len(tensors))]


class GivenPlaces:
    """Those that were made before, in the order of asking."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._given = list(places)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Places`."""
        return [self._given.pop(0) for _ in tensors]


def places_like(tensors: Sequence[Tensor], allocate: Callable[[int], Tensor]) -> list[Tensor]:
    """A place for each, in memory of their own."""
    return HostPlaces(allocate).like(tensors)


def _extent(tensor: Tensor) -> int:
    """Numbers between the first and the last in memory, both included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))


def _size(host: Tensor) -> int:
    return host.untyped_storage().nbytes()


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
