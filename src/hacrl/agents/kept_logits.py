"""Logits that wait for the backward pass, as many as a GPU has room for; the others are made again in it.

Nothing counts on them: estimates and plans are made without, and what is kept takes only what is left over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from hacrl.agents.free_memory import unused_memory

# Left free, of what this process may have of a device. Kept logits are gone before the backward pass comes to
# the layers; until then there are a reference's forward pass, a piece's logits in float32, and gradients of
# hidden states and of the output layer: a few GiB, whatever the size of the device. Nor can all be had that
# looks free: some lies in blocks too small or belongs to recorded graphs, and other processes grow. Memory
# that runs out costs an attempt, and no logits are kept for the rest of the run.
LEFT_FREE = 0.25
LEAST_LEFT_FREE = 6 * 2**30  # bytes


@dataclass
class Waiting:
    """What is said of logits for a block of code, and what became of them."""

    allowed: bool
    any_kept: bool = False


_WAITING: ContextVar[Waiting | None] = ContextVar("waiting_logits", default=None)


@contextmanager
def logits_may_wait(allowed: bool) -> Iterator[Waiting]:
    """Within the block, logits are kept if there is room, or none are: memory is to be spared."""
    waiting = Waiting(allowed)
    token = _WAITING.set(waiting)
    try:
        yield waiting
    finally:
        _WAITING.reset(token)


def may_wait() -> bool:
    """See :func:`logits_may_wait`; outside of its blocks they may."""
    waiting = _WAITING.get()
    return waiting is None or waiting.allowed


def room(device: torch.device) -> int:
    """Bytes of a device that will not be missed; none but on a GPU."""
    if device.type != "cuda":
        return 0
    unused, total = unused_memory(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)  # all, unless somebody says so
    available = min(unused, allowed - torch.cuda.memory_allocated(device))
    return max(0, available - max(int(LEFT_FREE * allowed), LEAST_LEFT_FREE))


class KeptLogits:
    """Of some pieces, by their number. The first are kept: the backward pass lets go of them first."""

    def __init__(self, room: int) -> None:
        self._room = room  # bytes
        self._logits: dict[int, Tensor] = {}

    def offer(self, piece: int, logits: Tensor) -> None:
        """Keep them if there is room."""
        if logits.nbytes <= self._room:
            self._room -= logits.nbytes
            self._logits[piece] = logits
            if (waiting := _WAITING.get()) is not None:
                waiting.any_kept = True

    def take(self, piece: int) -> Tensor | None:
        """Only once, since whoever takes them overwrites them: another backward pass makes its own."""
        return self._logits.pop(piece, None)
