"""How long a piece of work takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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


def recorded(work: Sequence[Callable[[], object]]) -> float:
    """Seconds of the fastest of 5 replays of a CUDA graph with all of it, after it was done once."""
    for one in work:
        one()
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in work:
            one()
    return best_of(5, graph.replay)


def copy_bandwidth() -> float:
    """Bytes a second that a GPU reads and writes in a large copy."""
    source = torch.randn(2**28, device="cuda")
    copied = torch.empty_like(source)
    return 2 * source.nbytes / best_of(5, lambda: copied.copy_(source))


def synchronize() -> None:
    """Wait for a GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
