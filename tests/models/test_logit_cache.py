"""Logits cached for the backward pass: as many chunks as fit, and the same numbers.

Pieces of 5, 4 and 4 tokens have logits of 400, 320 and 320 bytes.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

import pytest
import torch
from torch import nn

from hacrl.models.compile import compiled
from hacrl.models.lm_head import linear_logprobs, spare_memory
from tests.models.linear_case import (
    ALL,
    ONE,
    SOME,
    TOKENS,
    VOCABULARY,
    Alive,
    Case,
    Products,
    set_spare_memory,
)
from tests.support.compiler import use_compiler

GIB = 2**30
PLENTY = 10**9  # bytes
traced = partial(torch.compile, backend="aot_eager")


def logits_made(products: Products) -> int:
    return sum(shape[1] == VOCABULARY for shape in products.shapes)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("most", [ALL, SOME, ONE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_are_the_same_to_the_bit(monkeypatch, dtype, most, compiling) -> None:
    use_compiler(monkeypatch, traced)
    case = Case(dtype)
    found = []
    for bytes_left in (0, 720, PLENTY):
        set_spare_memory(monkeypatch, bytes_left)
        with compiled(nn.Module(), compiling), Products() as products:
            found.append(case.by_hand(0.7, most))
        pieces = {ALL: 1, SOME: 3, ONE: TOKENS}[most]
        kept = {0: 0, 720: {ALL: 0, SOME: 2, ONE: 9}[most], PLENTY: pieces}[bytes_left]
        assert logits_made(products) == 2 * pieces - kept
    for some_or_all in found[1:]:
        assert all(map(torch.equal, found[0], some_or_all))


@pytest.mark.parametrize(
    ("bytes_left", "kept", "counts"),  # cached chunks, and how many exist in the backward pass
    [
        (0, 0, [0, 1, 0, 1, 0, 1, 0]),  # each is freed before the next is computed
        (319, 0, [0, 1, 0, 1, 0, 1, 0]),
        (320, 1, [1, 2, 1, 0, 1, 0]),  # only the first is cached
        (400, 1, [1, 0, 1, 0, 1, 0]),
        (719, 1, [1, 0, 1, 0, 1, 0]),
        (720, 2, [2, 1, 0, 1, 0]),
        (1039, 2, [2, 1, 0, 1, 0]),
        (1040, 3, [3, 2, 1, 0]),
    ],
)
def test_as_many_chunks_are_cached_as_fit(monkeypatch, bytes_left, kept, counts) -> None:
    case = Case()
    asked = set_spare_memory(monkeypatch, bytes_left)
    with Alive(torch.bfloat16) as logits:
        found = linear_logprobs(case.hidden, case.weight, case.targets, 1.0, SOME)
        assert logits.now == kept
        assert logits.most == min(kept + 1, 3)  # and one that is not cached
        before = len(logits.counts)
        found.backward(case.above)
        assert logits.now == 0
    assert [count for count, _ in groupby(logits.counts[before:])] == counts
    assert logits.made == ["mm"] * (6 - kept)
    assert asked == [case.hidden.device]  # once for all chunks


def test_nothing_is_cached_without_gradients(monkeypatch) -> None:
    case = Case()
    asked = set_spare_memory(monkeypatch, PLENTY)
    with torch.no_grad(), Alive(torch.bfloat16) as logits:
        linear_logprobs(case.hidden, case.weight, case.targets, 1.0, SOME)
    assert logits.most == 1
    frozen = case.weight.detach()
    with Alive(torch.bfloat16) as logits:
        found = linear_logprobs(case.hidden.detach(), frozen, case.targets, 1.0, SOME)
    assert logits.most == 1
    assert not found.requires_grad
    assert asked == []
    for hidden, weight in ((case.hidden, frozen), (case.hidden.detach(), case.weight)):
        with Alive(torch.bfloat16) as logits:
            found = linear_logprobs(hidden, weight, case.targets, 1.0, SOME)
        assert logits.now == 3
        del found
        assert logits.now == 0  # no other reference to them


def test_a_second_backward_pass_recomputes_logits(monkeypatch) -> None:
    case = Case()
    _, *expected = case.by_hand(0.7)
    set_spare_memory(monkeypatch, PLENTY)
    found = linear_logprobs(case.hidden, case.weight, case.targets, 0.7, SOME)
    for logits in (0, 3, 3):
        with Products() as products:
            again = torch.autograd.grad(found, (case.hidden, case.weight), case.above, retain_graph=True)
        assert all(map(torch.equal, again, expected))
        assert logits_made(products) == logits


@pytest.mark.parametrize(
    ("total", "free", "reserved", "allocated", "fraction", "left"),
    [
        (100, 60, 30, 20, 1.0, 45),  # 60 + 10 - a quarter
        (100, 60, 30, 30, 1.0, 35),
        (100, 20, 70, 65, 1.0, 0),  # exactly a quarter
        (100, 5, 90, 88, 1.0, 0),
        (100, 60, 30, 20, 0.48, 16),  # may have 48, has 20, leaves 12
        (100, 8, 30, 20, 0.48, 6),  # other processes use the rest: 8 + 10 - 12
        (16, 12, 2, 1, 1.0, 7),  # 13, but a quarter would be too little
        (16, 4, 10, 9, 1.0, 0),
    ],
)
def test_spare_memory_leaves_a_reserve_free(
    monkeypatch, total, free, reserved, allocated, fraction, left
) -> None:
    gpu = torch.device("cuda", 0)
    says = {
        "mem_get_info": (free * GIB, total * GIB),
        "memory_reserved": reserved * GIB,
        "memory_allocated": allocated * GIB,
        "get_per_process_memory_fraction": fraction,
    }
    for name, value in says.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: {gpu: value}[device])
    assert spare_memory(gpu) == left * GIB


def test_nothing_is_cached_on_a_cpu() -> None:
    assert spare_memory(torch.device("cpu")) == 0
    case = Case()
    with Products() as products:
        case.by_hand()
    assert logits_made(products) == 6
