"""How long a piece of work takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(work: Callable[[], object]) -> float:
    """Seconds, until the device has done it."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest, after one that does not count."""
    return min([timed(work) for _ in range(repeats + 1)][1:])


def synchronize() -> None:
    """Wait for a GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
