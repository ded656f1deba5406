"""Copies that happen only when a caller waits for them, and memory that is poisoned before and after.

On a GPU a missing wait mostly goes unnoticed; here it always shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.training.offload import Copy, PendingCopies


class LateCopies:
    """Copies made in ``wait``, after the copies they were told to come after."""

    def __init__(self, copies: Sequence[Copy], after: PendingCopies | None) -> None:
        self.copies = list(copies)
        self.after = after
        if not (isinstance(after, LateCopies) and after.copies):  # else the target may still be read by it
            self._poison([copy.target for copy in copies])

    def wait_on_device(self) -> None:
        self.wait()

    @torch.no_grad()
    def wait(self) -> None:
        if self.after is not None:
            self.after.wait()
        for copy in self.copies:
            copy.target.copy_(copy.source)
        self._poison([copy.source for copy in self.copies])
        self.copies = []

    @staticmethod
    def _poison(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            tensor.fill_(float("nan"))


class LateTransfers:
    """Transfers between "the device", which is the CPU, and other memory. Counts the offloaded bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[int] = []  # requested bytes of host memory
        self.away = 0  # bytes
        self.moves: list[str] = []

    def allocate_host(self, size: int) -> Tensor:
        self.pieces.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in every kind of float

    def to_host(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        self.away += sum(copy.source.nbytes for copy in copies)
        self.moves.append("to_host")
        return LateCopies(copies, after)

    def to_device(
        self, copies: Sequence[Copy], after: PendingCopies | None, *, caller_holds_memory: bool = False
    ) -> PendingCopies:
        self.away -= sum(copy.source.nbytes for copy in copies)
        self.moves.append("to_device")
        return LateCopies(copies, after)
