"""Decoding's attention in vLLM by our kernel: numbers, graphs, FlashAttention. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hacrl.rollout.vllm.own_attention import with_own_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda", 0)
ROWS, PAGE, MOST = 256, 16, 30


def made(heads: int, key_heads: int, width: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Queries, a cache as vLLM lays it, and responses of 1 to 480 tokens, 8 to a prompt of 5 pages."""
    generator = torch.Generator(GPU).manual_seed(0)
    query = torch.randn(ROWS, heads, width, generator=generator, device=GPU).to(dtype)
    cache = torch.randn(900, 2, PAGE, key_heads, width, generator=generator, device=GPU).to(dtype)
    pages = torch.randint(900, (ROWS, MOST), generator=generator, device=GPU, dtype=torch.int32)
    pages[:, :5] = pages[::8, :5].repeat_interleave(8, dim=0)
    lengths = torch.randint(1, PAGE * MOST + 1, (ROWS,), generator=generator, device=GPU, dtype=torch.int32)
    lengths[:2] = torch.tensor([0, PAGE * MOST])
    keys, values = cache.unbind(1)
    return {"query": query, "keys": keys, "values": values, "pages": pages, "lengths": lengths}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "key_heads", "width"), [(16, 8, 128), (14, 2, 64), (4, 4, 64), (32, 8, 128), (32, 2, 256)]
)
def test_the_kernel_computes_plain_attention(heads, key_heads, width, dtype) -> None:
    from hacrl.rollout.vllm.paged_attention import (
        is_right,
        paged_attention,
        plain_attention,
        responses_together,
    )

    given = made(heads, key_heads, width, dtype)
    expected = plain_attention(**given, scale=width**-0.5)
    for group in {1, responses_together(heads // key_heads, 10**6)}:
        found = torch.full_like(given["query"], torch.nan)
        paged_attention(**given, scale=width**-0.5, out=found, group=group)
        torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.005)
        assert is_right(GPU, dtype, heads // key_heads, width, PAGE, group)


def test_a_recorded_graph_reads_what_is_there_when_it_runs() -> None:
    from hacrl.rollout.vllm.paged_attention import paged_attention, plain_attention

    given = made(16, 8, 128, torch.bfloat16)
    found, graph = torch.empty_like(given["query"]), torch.cuda.CUDAGraph()
    paged_attention(**given, scale=0.1, out=found)  # compiled
    with torch.cuda.graph(graph):
        paged_attention(**given, scale=0.1, out=found)
    given["lengths"].copy_(given["lengths"].flip(0))
    given["pages"].copy_(given["pages"].flip(1))
    graph.replay()
    torch.testing.assert_close(found.float(), plain_attention(**given, scale=0.1), rtol=0.01, atol=0.005)


def test_flash_attention_of_vllm_says_the_same() -> None:
    flash = pytest.importorskip("vllm.vllm_flash_attn")
    theirs = flash.flash_attn_varlen_func
    given = made(16, 8, 128, torch.bfloat16)
    asked = []

    def watched(**named):
        asked.append(named["max_seqlen_q"])
        return theirs(**named)

    named = {
        "q": given["query"],
        "k": given["keys"],
        "v": given["values"],
        "block_table": given["pages"],
        "seqused_k": given["lengths"],
        "cu_seqlens_q": torch.arange(ROWS + 1, dtype=torch.int32, device=GPU),
        "max_seqlen_q": 1,
        "max_seqlen_k": PAGE * MOST,
        "softmax_scale": 128**-0.5,
        "causal": True,
        "window_size": [-1, -1],
        "fa_version": 3 if flash.is_fa_version_supported(3) else 2,
    }
    ours, exact = torch.empty_like(given["query"]), torch.empty_like(given["query"])
    with_own_kernel(watched)(**named, out=ours)
    assert not asked
    theirs(**named, out=exact)
    torch.testing.assert_close(ours.float(), exact.float(), rtol=0.01, atol=0.005)
