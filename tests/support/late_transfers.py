"""Asynchronous copies that run as late as possible: only when waited for, with poisoned memory around them.

On a GPU, reading a copy without waiting often works by luck. Here it never does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.training.offload import Copy, Copying


class LateCopying:
    """A copy that runs in wait(), after the copy that it depends on."""

    def __init__(self, copies: Sequence[Copy], after: Copying | None) -> None:
        self.copies = list(copies)
        self.after = after
        if not (isinstance(after, LateCopying) and after.copies):  # else it may still read the target
            self._poison([copy.target for copy in copies])

    def ready(self) -> None:
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
    """Transfers between a CPU "device" and other CPU memory, with counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: list[int] = []  # requested bytes of host memory
        self.away = 0  # bytes
        self.moves: list[str] = []

    def host_memory(self, size: int) -> Tensor:
        self.pieces.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)  # NaN in every kind of float

    def leave(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        self.away += sum(copy.source.nbytes for copy in copies)
        self.moves.append("leave")
        return LateCopying(copies, after)

    def come_back(self, copies: Sequence[Copy], after: Copying | None, *, kept: bool = False) -> Copying:
        self.away -= sum(copy.source.nbytes for copy in copies)
        self.moves.append("come_back")
        return LateCopying(copies, after)
