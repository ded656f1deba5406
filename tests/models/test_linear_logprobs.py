"""The hand-written backward pass of the output layer: autograd's numbers within 16 bits, in less memory.

Bounds follow from rounding: logits, their gradients and the results are each rounded once, to nearest.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hacrl.models import lm_head as output_layer
from hacrl.models.compile import MAX_VARIANTS, compiled
from hacrl.models.lm_head import linear_logprobs
from hacrl.types import Sampling
from tests.models.linear_case import (
    ALL,
    ONE,
    SOME,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Alive,
    Case,
    Products,
    set_spare_memory,
)
from tests.support.compiler import use_compiler

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
KEEPING = pytest.mark.parametrize("room", [0, 10**9], ids=["recomputed", "cached"])  # bytes of spare memory
compiler_looks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
traced = partial(torch.compile, backend="aot_eager")


def test_numbers_worked_out_by_hand() -> None:
    weight = torch.tensor([[4.0], [0.0], [8.0], [-4.0]]).bfloat16().requires_grad_()
    hidden = torch.tensor([[0.0], [0.0], [0.5]]).bfloat16().requires_grad_()
    targets = torch.tensor([2, 1, 0])
    found = linear_logprobs(hidden, weight, targets, 2.0, 8)
    # a hidden state of 0: all four are equally likely; else logits are 2, 0, 4, -2, halved 1, 0, 2, -1
    total = 2.718282 + 1 + 7.389056 + 0.367879
    assert found.tolist() == pytest.approx([-1.386294, -1.386294, 1 - 2.440190], abs=1e-5)
    assert total == pytest.approx(2.71828182**2.440190, rel=1e-5)
    found.backward(torch.tensor([1.0, -2.0, 4.0]))
    # the mean weight is 2: (8 - 2) / 2, -2 (0 - 2) / 2; p = 0.2369, 0.0871, 0.6439, 0.0321, mean 5.9706
    assert hidden.grad.flatten().tolist() == pytest.approx([3.0, 2.0, 4 * (4 - 5.9706) / 2], rel=2**-7)
    # only the last token has a hidden state: 4 / 2 * 0.5 * (onehot - p)
    assert weight.grad.flatten().tolist() == pytest.approx([0.7631, -0.0871, -0.6439, -0.0321], rel=2**-7)


@HALVES
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("most", [ALL, SOME, ONE])
@pytest.mark.parametrize("compiling", [False, True])
def test_values_and_gradients_within_rounding(monkeypatch, compiling, most, temperature, dtype) -> None:
    use_compiler(monkeypatch, traced)
    case = Case(dtype)
    with compiled(nn.Module(), compiling):
        values, hidden, weight = case.by_hand(temperature, most)
    exact, of_hidden, of_weight, of_logits = case.exactly(temperature, rounded=True)
    assert (values.dtype, hidden.dtype, weight.dtype) == (torch.float32, dtype, dtype)
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=0)
    half = torch.finfo(dtype).eps / 2  # of a number, that rounding may change it by
    tiny = 2.0**-24  # float16 has none between this and 0
    each = half * of_logits.abs() + tiny
    bound = 1.01 * (each @ case.weight.detach().abs().double() + half * of_hidden.abs()) + 1e-5
    assert ((hidden - of_hidden).abs() <= bound).all()
    magnitudes = case.hidden.detach().abs().double()
    pieces = {ALL: 1, SOME: 3, ONE: TOKENS}[most]  # the sum is rounded after every one
    largest = (of_logits.abs().T @ magnitudes) * half * pieces
    assert ((weight - of_weight).abs() <= 1.01 * (each.T @ magnitudes + largest) + 1e-5).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_errors_are_not_larger_than_autograds(monkeypatch, temperature) -> None:
    case = Case(tokens=400, width=64)
    monkeypatch.setattr(output_layer, "MAX_LOGITS", 50 * VOCABULARY)
    old = case.by_autograd(Sampling(8, temperature))
    new = case.by_hand(temperature, 50 * VOCABULARY)
    truth = case.exactly(temperature)
    for before, now, true in zip(old, new, truth[:3], strict=True):
        assert (now - true).norm() <= 1.01 * (before - true).norm()
        assert (now - true).norm() < 0.02 * true.norm()
    # apart from rounded logits: a chunk's share of the weight's gradient is not rounded before it is added
    given = case.exactly(temperature, rounded=True)[2]
    assert (new[2] - given).norm() < 0.95 * (old[2] - given).norm()


def test_a_probability_near_one_still_has_a_gradient() -> None:
    # logits 12 and 0: 1 - p is e**-12 = 6.144e-6, of which p in float32 keeps two digits
    hidden = torch.tensor([[12.0]]).bfloat16().requires_grad_()
    weight = torch.tensor([[1.0], [0.0]]).bfloat16()
    found = linear_logprobs(hidden, weight, torch.tensor([0]), 1.0, ALL)
    assert found.item() == pytest.approx(-6.144e-6, rel=0.02)
    found.backward()
    assert hidden.grad.item() == pytest.approx(6.144e-6, rel=0.02)


@pytest.mark.parametrize("compiling", [False, True])
def test_gradients_only_for_trained_tensors(monkeypatch, compiling) -> None:
    use_compiler(monkeypatch, traced)
    case = Case()
    _, hidden, weight = case.by_hand()
    with compiled(nn.Module(), compiling):
        case.weight.requires_grad_(False)
        found = linear_logprobs(case.hidden, case.weight, case.targets, 1.0, SOME)
        found.backward(case.above)
        assert case.weight.grad is None
        assert torch.equal(case.hidden.grad, hidden)
        found = linear_logprobs(case.hidden.detach(), case.weight.requires_grad_(), case.targets, 1.0, SOME)
        found.backward(case.above)
        assert torch.equal(case.weight.grad, weight)


def test_no_matrix_product_for_frozen_tensors() -> None:
    logits, states, layer = (TOKENS, VOCABULARY), (TOKENS, WIDTH), (VOCABULARY, WIDTH)
    for wanted in ((True, True), (True, False), (False, True)):
        case = Case()
        case.hidden.requires_grad_(wanted[0])
        case.weight.requires_grad_(wanted[1])
        found = linear_logprobs(case.hidden, case.weight, case.targets, 1.0, ALL)
        with Products() as products:
            found.backward(case.above)
        assert products.shapes == [logits, *[states] * wanted[0], *[layer] * wanted[1]]


def test_tied_weights_get_gradients_from_both_ends() -> None:
    case = Case()
    ids = torch.arange(TOKENS) % 7
    factor = torch.linspace(-1, 1, WIDTH).bfloat16()
    tied = case.weight.detach().clone().requires_grad_()
    hidden = nn.functional.embedding(ids, tied) * factor
    linear_logprobs(hidden, tied, case.targets, 0.7, SOME).backward(case.above)
    exact = case.weight.detach().double().requires_grad_()
    logits = (nn.functional.embedding(ids, exact) * factor) @ exact.T
    logprobs = (logits / 0.7).log_softmax(-1).gather(1, case.targets.unsqueeze(1)).squeeze(1)
    (gradient,) = torch.autograd.grad(logprobs, exact, case.above.double())
    assert (tied.grad - gradient).norm() < 0.01 * gradient.norm()
    alone = Case().exactly(0.7)[2]
    assert (tied.grad - alone).norm() > 0.3 * gradient.norm()


def test_the_weight_gets_one_gradient_for_all_chunks() -> None:
    case, came = Case(), []
    case.weight.register_hook(lambda gradient: came.append(gradient.shape))
    doubled = case.weight * 1  # autograd would add up here what it gets
    doubled.register_hook(lambda gradient: came.append(gradient.shape))
    linear_logprobs(case.hidden, doubled, case.targets, 1.0, ONE).backward(case.above)
    assert came == [(VOCABULARY, WIDTH)] * 2


def test_nothing_is_saved_without_gradients() -> None:
    case = Case()
    kept: dict[bool, bool] = {}
    for wanted in (False, True):
        hidden = case.hidden.detach().clone().requires_grad_()
        there = weakref.ref(hidden)
        with torch.set_grad_enabled(wanted):
            found = linear_logprobs(hidden * 1, case.weight, case.targets, 0.7, SOME)
        assert (found.grad_fn is not None) == wanted
        assert torch.equal(found.detach(), case.by_hand(0.7)[0])
        del hidden
        gc.collect()
        kept[wanted] = there() is not None
    assert kept == {False: False, True: True}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_propagate(bad) -> None:
    case = Case()
    with torch.no_grad():
        case.hidden[3, 2] = bad
    values, hidden, weight = case.by_hand()
    others = torch.arange(TOKENS) != 3
    assert not values[3].isfinite()
    assert not hidden[3].isfinite().any()
    assert values[others].isfinite().all()
    assert hidden[others].isfinite().all()
    assert not weight.isfinite().all()
    case = Case()
    case.above[5] = bad
    _, hidden, weight = case.by_hand()
    assert not hidden[5].isfinite().all()
    assert not weight.isfinite().any()


def test_no_tokens_at_all() -> None:
    case = Case(tokens=0)
    values, hidden, weight = case.by_hand()
    assert (values.shape, hidden.shape) == ((0,), (0, WIDTH))
    assert torch.equal(weight, torch.zeros(VOCABULARY, WIDTH).bfloat16())


def test_one_chunk_of_logits_at_a_time_overwritten_by_its_gradient() -> None:
    case = Case()
    with Alive(torch.bfloat16) as halves, Alive(torch.float32) as floats:
        case.by_hand(0.7)
    assert halves.made == ["mm"] * 6  # three chunks, forward and again backward; no zeros, no copies
    assert halves.most == 1
    assert floats.made == ["_to_copy"] * 6
    assert floats.most == 1
    assert halves.largest == floats.largest == 5 * VOCABULARY  # 13 = 5 + 4 + 4


@compiler_looks
@KEEPING
def test_compiled_once_for_all_sizes_and_temperatures_in_any_thread(monkeypatch, room) -> None:
    from torch._dynamo.utils import counters

    set_spare_memory(monkeypatch, room)
    use_compiler(monkeypatch, traced)
    torch._dynamo.reset()
    counters.clear()
    for tokens, temperature, most in ((13, 1.0, ALL), (13, 0.7, SOME), (29, 0.6, 7 * VOCABULARY)):
        case = Case(tokens=tokens)
        with compiled(nn.Module()):
            found = linear_logprobs(case.hidden, case.weight, case.targets, temperature, most)
        thread = threading.Thread(target=found.backward, args=(case.above,))  # as for a GPU
        thread.start()
        thread.join()
        expected = case.exactly(temperature)
        assert (case.hidden.grad - expected[1]).norm() < 0.02 * expected[1].norm()
        with torch.no_grad(), compiled(nn.Module()):
            again = linear_logprobs(case.hidden, case.weight, case.targets, temperature, most)
        assert torch.equal(again, found)
    assert counters["stats"]["unique_graphs"] == 2  # forward, backward
    assert counters["graph_break"] == {}


@KEEPING
def test_compiled_for_any_number_of_tokens_and_one_vocabulary_with_our_limits(monkeypatch, room) -> None:
    """Check which sizes are dynamic and the recompile limit, also in the backward pass's thread."""
    from torch._dynamo import config

    set_spare_memory(monkeypatch, room)
    seen: list[tuple[bool, bool]] = []
    limits: list[int] = []

    def look(graph: torch.fx.GraphModule, given: list[Tensor]) -> Callable[..., object]:
        for node in graph.graph.find_nodes(op="placeholder"):
            known = node.meta["example_value"]
            if isinstance(known, Tensor) and known.dim() == 2:
                seen.append((isinstance(known.shape[0], int), isinstance(known.shape[1], int)))
        limits.append(config.recompile_limit)
        return graph.forward

    use_compiler(monkeypatch, partial(torch.compile, backend=look))
    torch._dynamo.reset()
    case = Case()
    with compiled(nn.Module()):
        found = linear_logprobs(case.hidden, case.weight, case.targets, 1.0, SOME)
    thread = threading.Thread(target=found.backward, args=(case.above,))
    thread.start()
    thread.join()
    assert case.weight.grad is not None
    assert seen == [(False, True)] * 2
    assert limits == [max(MAX_VARIANTS, config.recompile_limit)] * 2
