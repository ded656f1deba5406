"""Whether a decoder's cache stays between steps: by numbers that a GPU of 100 GiB would give."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hacrl.engines.hf.slot_cache import should_keep

GIB = 2**30


def cache(gib: float, device: str = "cuda"):
    """What is looked at of a cache; no memory is needed for that."""
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
def test_small_caches_stay_while_half_of_the_gpu_can_be_had(
    caches, free, reserved, allocated, kept, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated * GIB)
    assert should_keep([cache(gib) for gib in caches]) is kept


def test_on_a_cpu_they_always_stay() -> None:
    assert should_keep([cache(1000, "cpu")])
    assert should_keep([])
