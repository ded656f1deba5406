"""Whether a decoder's cache is kept between steps, on a GPU of 100 GiB."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hacrl.engines.hf.slot_cache import should_keep

GIB = 2**30


def cache(gib: float, device: str = "cuda"):
    """A stand-in for a cache of this size, without the memory."""
    return SimpleNamespace(nbytes=int(gib * GIB), states=[SimpleNamespace(device=torch.device(device))])


@pytest.mark.parametrize(
    ("caches", "free", "reserved", "allocated", "kept"),
    [
        ((6, 4), 60, 30, 30, True),  # a tenth
        ((6, 4.1), 60, 30, 30, False),
        ((6,), 40, 50, 50, False),  # agents take more than half
        ((6,), 40, 50, 40, True),  # of their 50, learning has left 10 to be used again
        ((6,), 40, 50, 41, False),
    ],
)
def test_small_caches_are_kept_while_half_of_the_gpu_is_unused(
    caches, free, reserved, allocated, kept, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated * GIB)
    assert should_keep([cache(gib) for gib in caches]) is kept


def test_caches_on_a_cpu_are_always_kept() -> None:
    assert should_keep([cache(1000, "cpu")])
    assert should_keep([])
