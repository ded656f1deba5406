"""Attention over shared keys as one operator: numbers, compiled layers, memory. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.agents import attention, shared_attention
from hacrl.agents.attention import Segments, attention_to_shared, fused_is_right, packed_attention
from hacrl.agents.compiled import compiled
from hacrl.agents.logprobs import packed_logprobs, padded_logprobs
from hacrl.agents.ragged import can_be_ragged, has_fused_attention
from hacrl.agents.shared_keys import Shared, handed_out
from hacrl.types import Sampling
from tests.agents.shared_prompts import apart, long_way_round, shared_prompt, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)


def on_gpu(case: tuple[int, Segments, Shared | None]) -> tuple[int, Segments, Shared | None]:
    tokens, segments, shared = case
    told = Segments(segments.queries.to(GPU), segments.keys.to(GPU), *segments[2:])
    return tokens, told, None if shared is None else Shared(*(one.to(GPU) for one in shared))


def case_of(name: str, *lengths: int) -> tuple[int, Segments, Shared | None]:
    return on_gpu(shared_prompt(*lengths) if name == "shared" else apart(*lengths))


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
def test_the_trial_says_yes(dtype) -> None:
    assert fused_is_right(GPU, dtype)
    assert attention._IN_ONE_PIECE[GPU, dtype]


@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (16, 8), (8, 2), (14, 2)])
@pytest.mark.parametrize("case", ["shared", "apart"])
def test_the_operator_is_plain_attention(case, heads, key_heads, width, window) -> None:
    tokens, *told = case_of(case, 70, 130, 1, 64, 33)
    given = states(tokens, heads, key_heads, width)
    told = (*told, width**-0.5, window)
    found = with_gradients(shared_attention.shared_attention, given, *told)
    exact = [one.detach().float().requires_grad_() for one in given]
    truth = with_gradients(long_way_round, exact, *told)
    before = with_gradients(long_way_round, given, *told)
    for one, other, present in zip(found, truth, before, strict=True):
        assert one.dtype == torch.bfloat16
        assert spread(one, other) < 0.02
        assert spread(one, other) < 1.1 * spread(present, other) + 1e-4  # no worse than the long way round


def test_keys_as_a_view_with_heads_first() -> None:
    tokens, *told = case_of("shared", 70, 130, 1, 64)
    *given, weights = states(tokens, 8, 2, 128)
    turned = [one.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for one in given]
    assert not turned[1].is_contiguous()
    one = with_gradients(shared_attention.shared_attention, [*turned, weights], *told, 0.1, -1)
    other = with_gradients(shared_attention.shared_attention, [*given, weights], *told, 0.1, -1)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", ["shared", "apart"])
def test_compiled_it_is_the_same_for_any_number_of_tokens(case) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    assert fused_is_right(GPU, torch.bfloat16)
    torch._dynamo.reset()

    def layer(query, key, value, *told) -> Tensor:
        return attention_to_shared(query * 2, key + 1, value, *told, 0.1, -1).sin()

    counter = CompileCounterWithBackend("inductor")
    fast = torch.compile(layer, backend=counter, dynamic=True, fullgraph=True)
    for lengths in ((70, 130, 1, 64), (33, 40, 40), (61, 90, 20, 30, 30)):
        tokens, *told = case_of(case, *lengths)
        given = states(tokens, 16, 8, 128)
        pairs = zip(with_gradients(fast, given, *told), with_gradients(layer, given, *told), strict=True)
        for one, other in pairs:
            assert spread(one, other) < 0.02
    assert counter.frame_count == 1
    assert any("shared_attention" in str(node.target) for node in counter.graphs[0].graph.nodes)


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
    assert has_fused_attention(model)
    assert can_be_ragged(model)
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


def test_no_copies_are_kept_for_the_backward_pass() -> None:
    tokens, segments, shared = case_of("shared", 400, *[50] * 8)
    assert shared is not None
    *given, _ = states(tokens, 16, 8, 128)

    def long_way(*told) -> Tensor:
        copies = [handed_out(one, shared) for one in told[1:]]
        return packed_attention(told[0], copies[0], copies[1], segments, 0.1, -1)

    def one_piece(*told) -> Tensor:
        return shared_attention.shared_attention(*told, segments, shared, 0.1, -1)

    kept = []
    for attend in (long_way, one_piece):
        with torch.no_grad():
            attend(*given)  # whatever is allocated once
        before = torch.cuda.memory_allocated(GPU)
        out = attend(*given)
        kept.append(torch.cuda.memory_allocated(GPU) - before)
        del out
    copies = 2 * len(shared.places) * 8 * 128 * 2
    assert kept[1] < kept[0] - 0.9 * copies
    assert kept[1] < 1.2 * (tokens * 16 * 128 * 2 + 16 * tokens * 4)
