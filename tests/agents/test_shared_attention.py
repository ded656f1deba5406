"""Attention over shared keys as one operator: what autograd makes of the long way round, and less kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hacrl.agents import attention, attention_kernels, shared_attention, shared_keys
from hacrl.agents.attention import Segments, attention_to_shared
from hacrl.agents.logprobs import packed_logprobs
from hacrl.agents.ragged import can_be_ragged
from hacrl.agents.shared_keys import Shared, added_up, backwards, repeated, sum_copies
from hacrl.types import Sampling
from tests.agents.shared_prompts import apart, long_way_round, shared_prompt, with_gradients
from tests.support.compiler import use_compiler
from tests.support.tiny import char_agent

CPU = torch.device("cpu")


CASES = {"shared": shared_prompt(5, 2, 1, 7), "apart": apart(4, 1, 9)}


def states(tokens: int, heads: int, key_heads: int, dtype=torch.float32) -> list[Tensor]:
    """Queries, keys and values as models have them, heads first; and weights of what is seen."""
    torch.manual_seed(0)
    turned = [torch.randn(count, tokens, 8).transpose(0, 1) for count in (heads, key_heads, key_heads)]
    return [one.to(dtype).detach().requires_grad_() for one in turned] + [torch.randn(tokens, heads, 8)]


@pytest.fixture
def in_one_piece(monkeypatch):
    """As on a GPU in 16 bits, where it has been tried."""
    monkeypatch.setattr(attention, "has_kernel", lambda states: True)
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setitem(attention._IN_ONE_PIECE, (CPU, dtype), True)


def test_heads_and_copies_by_hand() -> None:
    # two tokens, of which the first is seen twice; two key heads, each for two query heads
    places = torch.tensor([0, 0, 1])
    keys = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).unsqueeze(-1)
    assert repeated(keys, places, 2).squeeze(-1).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4]]
    assert repeated(keys, None, 2).squeeze(-1).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert repeated(keys, places, 1).squeeze(-1).tolist() == [[1, 2], [1, 2], [3, 4]]
    copies = torch.tensor([[1.0, 2, 4, 8], [16, 32, 64, 128], [256, 512, 1024, 2048]]).unsqueeze(-1)
    way_back = backwards(places, 2)
    total = added_up(copies, *way_back, 2).squeeze(-1)
    assert total.tolist() == [[1 + 2 + 16 + 32, 4 + 8 + 64 + 128], [256 + 512, 1024 + 2048]]
    assert added_up(copies, None, None, 2).squeeze(-1).tolist() == [[3, 12], [48, 192], [768, 3072]]
    assert torch.equal(added_up(copies, *way_back, 1), sum_copies(copies, *way_back))


def test_sums_are_rounded_once() -> None:
    # in 16 bits, 256 + 1 is 256: four ones more would be lost one by one
    copies = torch.tensor([256.0, 1, 1, 1, 1, 0]).bfloat16().view(3, 2, 1)
    way_back = backwards(torch.tensor([0, 0, 0]), 1)
    assert added_up(copies, *way_back, 2).item() == 260


@pytest.mark.parametrize("window", [-1, 0, 3])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_is_the_long_way_round(case, group, window, dtype) -> None:
    tokens, *told = CASES[case]
    given = states(tokens, 4, 4 // group, dtype)
    found = with_gradients(shared_attention.shared_attention, given, *told, 0.3, window)
    exact = [one.detach().float().requires_grad_() for one in given]
    expected = with_gradients(long_way_round, exact, *told, 0.3, window)
    close = {"rtol": 0.02, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, **close)


@pytest.mark.parametrize("case", CASES)
def test_torch_agrees_with_what_is_said_of_the_operators(case) -> None:
    tokens, segments, shared = CASES[case]
    *given, weights = states(tokens, 4, 2)
    way = (None, None, None) if shared is None else shared
    told = (*given, *segments, *way, 0.3, -1)
    torch.library.opcheck(torch.ops.hacrl.shared_attention.default, told)
    out, sums = torch.ops.hacrl.shared_attention(*told)
    plain = [one.detach().contiguous() for one in (weights, *given, out, sums)]
    sizes = segments.most_queries, segments.most_keys
    told = (*plain, segments.queries, segments.keys, *way, *sizes, 0.3, -1)
    torch.library.opcheck(torch.ops.hacrl.shared_attention_backward.default, told)


def kept(attend, given, *told) -> int:
    """Bytes for the backward pass, what was there before not counted."""
    before = {one.untyped_storage().data_ptr() for one in (*given, *told[0][:2], *(told[1] or ()))}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(*given[:3], *told)
    assert out.requires_grad
    return sum(storages.values())


def test_no_copies_are_kept_for_the_backward_pass() -> None:
    tokens, *told = CASES["shared"]
    given = states(tokens, 4, 2)
    found = kept(shared_attention.shared_attention, given, *told, 0.3, -1)
    assert found == tokens * 4 * 8 * 4 + 4 * tokens * 4  # what was seen, and the scores' log-sum-exp


@pytest.mark.parametrize("case", CASES)
def test_it_is_used_where_it_was_tried_and_something_is_shared(monkeypatch, in_one_piece, case) -> None:
    used = []
    monkeypatch.setattr(attention, "shared_attention", lambda *told: used.append(told[4]))
    monkeypatch.setattr(attention, "packed_attention", lambda *told: used.append("packed"))
    tokens, segments, shared = CASES[case]
    for key_heads in (2, 4):
        *given, _ = states(tokens, 4, key_heads)
        attention_to_shared(*given, segments, shared, 0.3, -1)
    assert used == ([shared, shared] if case == "shared" else [None, "packed"])
    used.clear()
    attention._IN_ONE_PIECE[CPU, torch.float32] = False
    attention_to_shared(*given, segments, shared, 0.3, -1)
    monkeypatch.setattr(attention, "has_kernel", lambda states: False)
    attention._IN_ONE_PIECE[CPU, torch.float32] = True
    attention_to_shared(*given, segments, shared, 0.3, -1)
    assert used == ["packed", "packed"]


@pytest.mark.parametrize("ask", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_trial_finds_out(monkeypatch, ask) -> None:
    with ask():
        assert attention._same_in_one_piece(CPU, torch.float32)
        assert attention._same_in_one_piece(CPU, torch.bfloat16)

    def twice(*given) -> Tensor:
        return 2 * added_up(*given)

    def missing(*given) -> None:
        raise TypeError

    for name, wrong in (("added_up", twice), ("repeated", missing)):
        with monkeypatch.context() as patch, ask():
            patch.setattr(shared_attention, name, wrong)
            assert not attention._same_in_one_piece(CPU, torch.float32)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_what_is_found_out_is_remembered(monkeypatch, kernels, same) -> None:
    monkeypatch.setattr(attention, "_IN_ONE_PIECE", {})
    monkeypatch.setattr(attention, "kernels_are_right", lambda device: kernels)
    monkeypatch.setattr(attention, "_same_in_one_piece", lambda device, dtype: same)
    assert not attention._in_one_piece(CPU, torch.bfloat16)
    assert attention.fused_is_right.__wrapped__(CPU, torch.bfloat16)  # which is one or the other, either way
    assert attention._in_one_piece(CPU, torch.bfloat16) == (kernels and same)
    assert not attention._in_one_piece(CPU, torch.float16)


def test_without_triton_no_kernel_is_right(monkeypatch) -> None:
    monkeypatch.setattr(shared_keys, "_kernels", lambda: None)
    assert not shared_keys.kernels_are_right.__wrapped__(CPU)


def test_kernels_are_compared_with_plain_sums(monkeypatch) -> None:
    class Kernels:
        sum_copies = staticmethod(sum_copies)
        repeated = staticmethod(repeated)

    def forgets_the_group(copies, order, starts, group) -> Tensor:
        return sum_copies(copies[:, : copies.shape[1] // group], order, starts, 1)

    def in_another_order(states, places, group) -> Tensor:
        return (states if places is None else states[places]).repeat(1, group, 1)

    monkeypatch.setattr(shared_keys, "_kernels", lambda: Kernels)
    are_right = shared_keys.kernels_are_right.__wrapped__
    assert are_right(CPU)
    for name, wrong in (("sum_copies", forgets_the_group), ("repeated", in_another_order)):
        with monkeypatch.context() as patch:
            patch.setattr(Kernels, name, staticmethod(wrong))
            assert not are_right(CPU)


@pytest.mark.parametrize("window", [-1, 3])
def test_torchs_kernels_take_what_they_are_given(window) -> None:
    """Without a GPU, at least whether they can be called so, and what comes back."""
    tokens, segments, shared = CASES["shared"]
    copies = len(shared.places)
    with torch.device("meta"):
        query, gradient = (torch.empty(tokens, 4, 64, dtype=torch.bfloat16) for _ in "qg")
        key, value = (torch.empty(copies, 4, 64, dtype=torch.bfloat16) for _ in "kv")
    told = Segments(segments.queries.to("meta"), segments.keys.to("meta"), *segments[2:])
    few = key[:, :2], value[:, :2]
    out, sums = attention_kernels.forward(query, *few, told, 0.3, window)
    assert (out.shape, sums.shape, sums.dtype) == (query.shape, (4, tokens), torch.float32)
    found = attention_kernels.backward(gradient, query, key, value, out, sums, told, 0.3, window)
    assert [one.shape for one in found] == [query.shape, key.shape, value.shape]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at them
@pytest.mark.parametrize("case", ["shared", "apart"])
def test_compiled_it_is_the_same_for_any_number_of_tokens(in_one_piece, case) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()

    def layer(query, key, value, *told) -> Tensor:
        return attention_to_shared(query * 2, key + 1, value, *told, 0.3, -1).sin()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    sizes = [(5, 2, 1, 7), (3, 4, 4), (6, 9, 2, 3, 3)]
    for lengths in sizes:
        tokens, *told = shared_prompt(*lengths) if case == "shared" else apart(*lengths)
        given = states(tokens, 4, 2)
        for one, other in zip(
            with_gradients(compiled, given, *told), with_gradients(layer, given, *told), strict=True
        ):
            torch.testing.assert_close(one, other)
    assert counter.frame_count == 1
    graph = counter.graphs[0].graph
    assert any("shared_attention" in str(node.target) for node in graph.nodes)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("compiling", [False, True])
def test_a_models_gradients_are_the_same(monkeypatch, request, compiling) -> None:
    """With its layers compiled or not, some prompts shared and none."""
    from torch._dynamo.utils import counters

    from hacrl.agents import compiled, packing

    def share(places: Tensor, tokens: int, device: torch.device) -> Shared:
        return Shared(places, *backwards(places, tokens))

    monkeypatch.setattr(packing, "share", share)
    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    model = char_agent(layers=2).model
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    assert can_be_ragged(model)
    assert heads[0] > heads[1]
    prompt, other = (3, 1, 4, 1), (2, 7, 1)
    batches = [
        [(prompt, (5, 9, 2)), (other, (1, 8)), (prompt, (6, 5, 3, 5))],
        [(prompt, (5, 9)), (prompt, (6, 5, 3, 5)), (prompt, (2,))],
        [(prompt, (5, 9, 2)), (other, (1, 8))],
    ]

    def gradients(batch) -> list[Tensor]:
        logprobs = packed_logprobs(model, batch, Sampling(8), CPU)
        return list(torch.autograd.grad(logprobs.square().sum(), list(model.parameters())))

    expected = [gradients(batch) for batch in batches]
    request.getfixturevalue("in_one_piece")
    torch._dynamo.reset()
    counters.clear()
    for batch, truth in zip(batches, expected, strict=True):
        with compiled.compiled(model, compiling):
            found = gradients(batch)
        for one, other_one in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other_one, rtol=1e-4, atol=1e-5)
    if compiling:
        assert not counters["graph_break"]
