"""Attention in a tree by our kernels: numbers, compiled layers, memory. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.models.attention.prefix_tree import PrefixTree
from hacrl.models.attention.tree_attention import kernels_are_correct, tree_attention
from hacrl.models.compile import compiled
from hacrl.models.logprobs import packed_logprobs, padded_logprobs
from hacrl.models.packing_support import has_tree_attention
from hacrl.types import Sampling
from tests.models.prefix_trees import Groups, attention_with_copies, tree_of, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
# around the 64 tokens that a program has, and many to one prompt
GROUPS = [(70, [130, 1, 64, 33]), (5, []), (300, []), (64, [63, 65, 128]), (1, [1] * 9), (90, [400] * 6)]


def on_gpu(groups: Groups) -> tuple[int, PrefixTree]:
    tokens, tree = tree_of(groups)
    return tokens, tree.moved(lambda part: part.to(GPU))


def states(tokens: int, heads: int, key_heads: int, width: int, dtype=torch.bfloat16) -> list[Tensor]:
    """Queries, keys and values, and weights of what is seen."""
    generator = torch.Generator(GPU).manual_seed(0)
    made = [
        torch.randn(tokens, count, width, generator=generator, device=GPU)
        for count in (heads, key_heads, key_heads, heads)
    ]
    return [one.to(dtype).requires_grad_() for one in made[:3]] + [made[3].to(dtype)]


def spread(one: Tensor, other: Tensor) -> float:
    """The mean difference, as a share of how far numbers lie from nothing."""
    return float((one.float() - other.float()).abs().mean() / other.float().abs().mean())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [-1, 8])
def test_the_trial_says_yes(dtype, window) -> None:
    assert kernels_are_correct(GPU, dtype, 16, 8, 128, window)


@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize(
    ("heads", "key_heads", "width"), [(4, 4, 64), (16, 8, 128), (8, 2, 80), (14, 2, 64), (6, 2, 96)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_compute_plain_attention(dtype, heads, key_heads, width, window) -> None:
    tokens, tree = on_gpu(GROUPS)
    given = states(tokens, heads, key_heads, width, dtype)
    told = (tree, width**-0.5, window)
    found = with_gradients(tree_attention, given, *told)
    exact = [one.detach().float().requires_grad_() for one in given]
    truth = with_gradients(attention_with_copies, exact, *told)
    before = with_gradients(
        attention_with_copies, given, *told
    )  # by torch's kernels, copies added up in 16 bits
    for one, other, present in zip(found, truth, before, strict=True):
        assert one.dtype == dtype
        assert spread(one, other) < 0.02
        assert spread(one, other) < 1.1 * spread(present, other) + 1e-4


def test_gradients_are_the_same_to_the_bit_every_time() -> None:
    tokens, tree = on_gpu([(300, [200] * 16), (700, [])])
    given = states(tokens, 16, 8, 128)
    first = with_gradients(tree_attention, given, tree, 0.1, -1)
    for _ in range(5):
        again = with_gradients(tree_attention, given, tree, 0.1, -1)
        assert all(torch.equal(one, other) for one, other in zip(again, first, strict=True))


def test_states_as_views_with_heads_first() -> None:
    tokens, tree = on_gpu(GROUPS)
    *given, weights = states(tokens, 8, 2, 128)
    turned = [one.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for one in given]
    assert not turned[1].is_contiguous()
    turned[2] = torch.cat([given[2].detach()] * 3, 1)[:, 2:4].requires_grad_()  # another view than the keys'
    weights_turned = weights.transpose(0, 1).contiguous().transpose(0, 1)
    one = with_gradients(tree_attention, [*turned, weights_turned], tree, 0.1, -1)
    other = with_gradients(tree_attention, [*given, weights], tree, 0.1, -1)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_compiled_it_is_the_same_for_any_number_of_tokens() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()

    def layer(query, key, value, tree) -> Tensor:
        return tree_attention(query * 2, key + 1, value, tree, 0.1, -1).sin()

    counter = CompileCounterWithBackend("inductor")
    fast = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for groups in (GROUPS, [(33, [40, 40])], [(61, []), (90, []), (20, [])], [(7, [])]):
        tokens, tree = on_gpu(groups)
        given = states(tokens, 14, 2, 128)  # no table has as many numbers as there are heads
        pairs = zip(with_gradients(fast, given, tree), with_gradients(layer, given, tree), strict=True)
        for one, other in pairs:
            assert spread(one, other) < 0.02
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at them
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_a_models_gradients_are_as_near_to_the_truth_as_padded_ones(compiling, window) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=0,
    )
    model = Qwen3ForCausalLM(config).to(GPU)
    exact = Qwen3ForCausalLM(config).to(GPU)
    model.bfloat16()
    exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    assert has_tree_attention(model)
    assert not has_tree_attention(exact)
    prompt = tuple(range(3, 23))
    pairs = [(prompt, tuple(range(first, first + 9 + first))) for first in range(2, 8)] + [
        ((5, 6), (7, 8, 9))
    ]

    def gradients(one, logprobs) -> list[Tensor]:
        found = logprobs(one, pairs, Sampling(32), GPU)
        return list(torch.autograd.grad(found.float().mean(), list(one.parameters())))

    truth, padded = gradients(exact, padded_logprobs), gradients(model, padded_logprobs)
    with compiled(model, compiling):
        packed = gradients(model, packed_logprobs)
    far, usual = (
        sum(spread(one, other) for one, other in zip(found, truth, strict=True)) / len(truth)
        for found in (packed, padded)
    )
    assert far < 1.5 * usual + 0.01


def test_no_copies_are_made() -> None:
    tokens, tree = on_gpu([(400, [50] * 8)])
    *given, weights = states(tokens, 16, 8, 128)
    with_gradients(tree_attention, [*given, weights], tree, 0.1, -1)  # whatever is allocated once
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    out = tree_attention(*given, tree, 0.1, -1)
    own = tokens * 16 * 128 * 2  # bytes of queries, twice those of keys
    assert torch.cuda.max_memory_allocated(GPU) - before < 1.1 * (own + 16 * tokens * 4)
    torch.autograd.grad(out, given, weights)
    sums = 2 * 16 * tokens * 4 + 2 * tree.partial_sums * 8 * 64 * 128 * 4
    assert torch.cuda.max_memory_allocated(GPU) - before < 1.1 * (3 * own + sums)
