"""Prefix trees, and attention over them without copies against autograd over attention with copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hacrl.models import packing_support
from hacrl.models.attention import prefix_tree as tree_module
from hacrl.models.attention import reference, tree_attention
from hacrl.models.attention.prefix_tree import TILE, concatenated_ranges
from hacrl.models.logprobs import packed_logprobs
from hacrl.models.packing import pack
from hacrl.types import Sampling
from tests.models.prefix_trees import attention_with_copies, tree_of, with_gradients
from tests.support.compiler import use_compiler
from tests.support.tiny import char_agent

CPU = torch.device("cpu")
# a prompt with three responses, a sequence without any, and another prompt with two
GROUPS = [(5, [2, 1, 7]), (4, []), (1, [3, 3])]


def states(tokens: int, heads: int, key_heads: int, dtype=torch.float32) -> list[Tensor]:
    """Return queries, keys and values as views with heads first, and weights of the outputs."""
    torch.manual_seed(0)
    turned = [torch.randn(count, tokens, 8).transpose(0, 1) for count in (heads, key_heads, key_heads)]
    return [one.to(dtype).detach().requires_grad_() for one in turned] + [torch.randn(tokens, heads, 8)]


def test_concatenated_ranges_by_hand() -> None:
    assert concatenated_ranges(torch.tensor([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]
    assert concatenated_ranges(torch.tensor([2, 0, 3]), torch.tensor([7, 9, 4])).tolist() == [7, 8, 4, 5, 6]


def rows(table: Tensor, columns: int) -> list[list[int]]:
    return table.view(-1, columns).tolist()


def test_a_tree_by_hand() -> None:
    # a prefix of 100 tokens, sequences of 3 and 70 that share it, and one of 2 without a prefix
    tokens, tree = tree_of([(100, [3, 70]), (2, [])])
    assert tokens == 175
    assert rows(tree.sequences, 5) == [
        [0, 100, 0, 0, 173],
        [100, 103, 0, 100, 103],
        [103, 173, 0, 100, 173],
        [173, 175, 0, 0, 175],
        [175, 175, 0, 0, 175],  # the empty sequence
    ]
    assert TILE == 64
    assert rows(tree.tiles, 2) == [[0, 0], [0, 64], [1, 100], [2, 103], [2, 167], [3, 173], [4, 175]]
    assert tree.positions.tolist() == [*range(100), *range(100, 103), *range(100, 170), 0, 1]
    # keys of a tile, and the queries that attend to them: 173, 109, 70, 6, 3, 2 tokens and none
    assert rows(tree.key_tasks, 5) == [
        [0, 100, 0, 173, -1],
        [64, 100, 64, 173, -1],
        [103, 173, 103, 173, -1],
        [167, 173, 167, 173, -1],
        [100, 103, 100, 103, -1],
        [173, 175, 173, 175, -1],
        [175, 175, 175, 175, -1],
        [0, 0, 0, 0, -1],  # the empty task
    ]
    assert (rows(tree.reductions, 4), tree.partial_sums) == (
        [[0, 0, 0, 0]] * 2,
        2,
    )  # no partial sums


def test_queries_of_a_prefix_are_divided_into_tasks_by_hand(monkeypatch) -> None:
    monkeypatch.setattr(tree_module, "MIN_QUERIES_PER_TASK", 100)
    monkeypatch.setattr(tree_module, "ENOUGH_PROGRAMS", 5)
    # 70 tokens in two tiles: 300 and 236 queries, so 3 tasks of 100 and 3 of 79; the single 250 stays whole
    tokens, tree = tree_of([(70, [200, 30]), (250, [])])
    assert tokens == 550
    *tasks, empty_task = rows(tree.key_tasks, 5)
    assert empty_task == [0, 0, 0, 0, -1]
    prefix = [task for task in tasks if task[1] == 70]
    assert sorted(prefix, key=lambda task: task[4]) == [
        [0, 70, 0, 100, 0],
        [0, 70, 100, 200, 1],
        [0, 70, 200, 300, 2],
        [64, 70, 64, 143, 3],
        [64, 70, 143, 222, 4],
        [64, 70, 222, 300, 5],
    ]
    assert rows(tree.reductions, 4) == [[0, 70, 0, 3], [64, 70, 3, 6], *[[0, 0, 0, 0]] * 2]
    assert tree.partial_sums == 6
    assert all(task[4] == -1 for task in tasks if task[1] != 70)
    lengths = [until - begin for _, _, begin, until, _ in tasks]
    assert lengths == sorted(lengths, reverse=True)
    # with enough tiles, no task is divided: two tiles are enough for two programs
    monkeypatch.setattr(tree_module, "ENOUGH_PROGRAMS", 2)
    _, tree = tree_of([(70, [200, 30])])
    assert tree.partial_sums == 2
    assert {task[4] for task in rows(tree.key_tasks, 5)[:-1]} == {-1}


def test_empty_sequences_change_no_other_sequence() -> None:
    tokens, tree = tree_of([(3, [2, 0]), (4, [2, 1])])
    assert tokens == 12
    reach = {(own, end): reach for own, end, _, _, reach in rows(tree.sequences, 5)}
    assert reach == {(0, 3): 5, (3, 5): 5, (5, 5): 5, (5, 9): 12, (9, 11): 11, (11, 12): 12, (12, 12): 12}


def test_pairs_become_a_tree_with_each_shared_prompt_once() -> None:
    pairs = [((1, 2), (3,)), ((4,), (5, 6)), ((1, 2), (7, 8, 9))]
    packed = pack(pairs, CPU, as_tree=True)
    tree = packed.inputs["tree"]
    assert packed.inputs["input_ids"].tolist() == [[1, 2, 3, 7, 8, 9, 4, 5, 6]]
    assert tree.positions.tolist() == packed.inputs["position_ids"][0].tolist() == [0, 1, 2, 2, 3, 4, 0, 1, 2]
    assert rows(tree.sequences, 5)[:-1] == [
        [0, 2, 0, 0, 6],
        [2, 3, 0, 2, 3],
        [3, 6, 0, 2, 6],
        [6, 9, 0, 0, 9],
    ]
    assert packed.inputs["key_copies"] is packed.inputs["cu_seq_lens_q"] is None


@pytest.mark.parametrize("window", [-1, 0, 3])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_equals_attention_with_copies(group, window, dtype) -> None:
    tokens, tree = tree_of(GROUPS)
    given = states(tokens, 4, 4 // group, dtype)
    found = with_gradients(tree_attention.tree_attention, given, tree, 0.3, window)
    exact = [one.detach().float().requires_grad_() for one in given]
    expected = with_gradients(attention_with_copies, exact, tree, 0.3, window)
    close = {"rtol": 0.02, "atol": 0.03} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.float(), other, **close)


def test_torch_opcheck_accepts_the_operators() -> None:
    tokens, tree = tree_of(GROUPS)
    *given, weights = states(tokens, 4, 2)
    told = (*given, *tree, 0.3, -1)
    torch.library.opcheck(torch.ops.hacrl.tree_attention.default, told)
    out, sums = torch.ops.hacrl.tree_attention(*told)
    plain = [one.detach() for one in (weights, *given, out, sums)]
    torch.library.opcheck(torch.ops.hacrl.tree_attention_backward.default, (*plain, *tree, 0.3, -1))


def test_only_outputs_and_sums_are_saved_for_the_backward_pass() -> None:
    tokens, tree = tree_of(GROUPS)
    *given, _ = states(tokens, 4, 2)
    before = {one.untyped_storage().data_ptr() for one in (*given, *tree[:5])}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = tree_attention.tree_attention(*given, tree, 0.3, -1)
    assert out.requires_grad
    assert sum(storages.values()) == tokens * 4 * 8 * 4 + 4 * tokens * 4  # the outputs and the scores' sums


class Kernels:
    """Stands for the GPU kernels, in float32."""

    forward = staticmethod(reference.forward)
    backward = staticmethod(reference.backward)


def changes(gives: str, change: Callable[[Tensor], None]) -> tuple[str, Callable[..., Any]]:
    """Return a kernel function with changed outputs or key gradients."""
    own = getattr(reference, gives)
    at = 0 if gives == "forward" else 1

    def wrong(*told: Any) -> Any:
        found = own(*told)
        change(found[at])
        return found

    return gives, wrong


def fails(*told: Any) -> Any:
    raise RuntimeError("out of resource")


WRONG = {
    "forgets a branch": changes("backward", lambda keys: keys[:70].mul_(0.8)),
    "nothing defined": changes("forward", lambda out: out[3].fill_(torch.nan)),
    "a token": changes("forward", lambda out: out[600].mul_(5)),
    "the last row of tiles": changes("forward", lambda out: out[63::64].zero_()),
    "a head": changes("backward", lambda keys: keys[:, 1].mul_(1.1)),
    "an error": ("forward", fails),
}


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_trial_rejects_wrong_kernels(monkeypatch, dtype, window) -> None:
    trial = partial(tree_attention.kernels_are_correct.__wrapped__, CPU, dtype, 4, 2)
    monkeypatch.setattr(tree_attention, "_kernels", lambda: Kernels)
    assert trial(16, window)
    assert trial(128, window)
    assert not trial(136, window)  # heads are too wide
    assert not tree_attention.kernels_are_correct.__wrapped__(CPU, dtype, 3, 2, 16, window)
    for name, wrong in WRONG.values():
        with monkeypatch.context() as patch:
            patch.setattr(Kernels, name, staticmethod(wrong))
            assert not trial(16, window)
    monkeypatch.setattr(tree_attention, "_kernels", lambda: None)  # no Triton
    assert not trial(16, window)


def test_out_of_memory_in_the_trial_is_raised(monkeypatch) -> None:
    def too_much(*told: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(tree_attention, "_kernels", lambda: Kernels)
    monkeypatch.setattr(Kernels, "forward", staticmethod(too_much))
    with pytest.raises(torch.OutOfMemoryError):
        tree_attention.kernels_are_correct.__wrapped__(CPU, torch.float32, 4, 2, 16, -1)


def test_kernels_are_tried_with_the_heads_of_the_model(monkeypatch) -> None:
    model = char_agent(layers=2).model
    config = model.config
    tried = []

    def trial(*told) -> bool:
        tried.append(told)
        return True

    assert not packing_support.has_tree_attention(model)  # on a CPU
    monkeypatch.setattr(packing_support, "has_fused_attention", packing_support.supports_packing)
    monkeypatch.setattr(packing_support, "kernels_are_correct", trial)
    assert packing_support.has_tree_attention(model)
    heads = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // heads[0]
    assert tried == [(CPU, torch.float32, *heads, width, -1)]
    monkeypatch.setattr(packing_support, "attention_windows", lambda config: [-1, 7])  # one with a window
    assert packing_support.has_tree_attention(model)
    assert {told[-1] for told in tried} == {-1, 7}
    monkeypatch.setattr(packing_support, "kernels_are_correct", lambda *told: told[-1] < 0)
    assert not packing_support.has_tree_attention(model)
    monkeypatch.setattr(packing_support, "kernels_are_correct", trial)
    keys = (heads[1], width)
    monkeypatch.setitem(
        packing_support._SHAPES, model, {0: [(keys, keys)], 1: [(keys, (heads[1], width - 1))]}
    )
    assert not packing_support.has_tree_attention(model)  # values are narrower


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by torch's compiler
@pytest.mark.parametrize("compiling", [False, True])
def test_a_models_gradients_are_the_same(monkeypatch, compiling) -> None:
    """Test with and without compiled layers, for shared prompts, unshared ones, and a single pair."""
    from torch._dynamo.utils import counters

    from hacrl.models import compile as compiled
    from hacrl.models import logprobs

    use_compiler(monkeypatch, partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(tree_module, "MIN_QUERIES_PER_TASK", 4)
    model = char_agent(layers=2).model
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    assert packing_support.supports_packing(model)
    assert heads[0] > heads[1]
    prompt, other = (3, 1, 4, 1), (2, 7, 1)
    batches = [
        [(prompt, (5, 9, 2)), (other, (1, 8)), (prompt, (6, 5, 3, 5)), (prompt, (2,) * 8), ((9,), (9,))],
        [(prompt, (5, 9)), (prompt, (6, 5, 3, 5)), (prompt, (2,))],
        [(prompt, (5, 9, 2)), (other, (1, 8))],
        [(prompt, (5, 9, 2))],
    ]

    places = {pack(batch, CPU, as_tree=True).inputs["tree"].partial_sums for batch in batches}
    assert len(places) > 2  # different numbers of partial sums

    def gradients(batch) -> list[Tensor]:
        logprobs = packed_logprobs(model, batch, Sampling(8), CPU)
        return list(torch.autograd.grad(logprobs.square().sum(), list(model.parameters())))

    expected = [gradients(batch) for batch in batches]
    monkeypatch.setattr(logprobs, "has_tree_attention", lambda model: True)
    torch._dynamo.reset()
    counters.clear()
    for batch, truth in zip(batches, expected, strict=True):
        with compiled.compiled(model, compiling):
            found = gradients(batch)
        for one, other_one in zip(found, truth, strict=True):
            torch.testing.assert_close(one, other_one, rtol=1e-4, atol=1e-5)
    if compiling:
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 2  # a layer and the output layer
