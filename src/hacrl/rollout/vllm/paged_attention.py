"""Attention of one new token per response over vLLM's pages of keys and values.

The counterpart of :mod:`hacrl.rollout.decode_kernel` for a cache in pages: a program has one response and one
head of keys, with all query heads that share it. Responses to one prompt have its pages in common and are
computed at about the same time: memory is asked for them once. With a few hundred tokens of context vLLM's
FlashAttention 3 takes 1.3 to 2.2 times as long (benchmarks/paged_attention.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_QUERIES = 16  # rows of the smallest matrix product
BLOCK, WARPS, STAGES = 32, 2, 3  # tokens at a time, and how
# Where it is the faster one: with enough programs to keep a GPU busy, and with short contexts. FlashAttention
# reads long ones at a GPU's full bandwidth, and splits one that is longer than the others.
ENOUGH_PROGRAMS, LONGEST = 1024, 1024
LOG2_E = 1.4426950408889634  # the kernel's powers are those of 2


def can_attend(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, out: Tensor, longest: int
) -> bool:
    """Whether the kernel is made for these and would be the faster one; ``longest``: that a length may be."""
    rows, heads, width = query.shape
    page, key_heads = keys.shape[1:3]
    return (
        query.dtype == keys.dtype == values.dtype == out.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and out.shape == query.shape
        and values.shape == keys.shape
        and len(pages) == len(lengths) == rows
        and rows * key_heads >= ENOUGH_PROGRAMS
        and longest <= LONGEST
        and width in (64, 128, 256)
        and heads // key_heads <= LEAST_QUERIES
        and page & (page - 1) == 0
        and all(states.stride(-1) == 1 for states in (query, keys, values, pages, lengths, out))
    )


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, scale: float, out: Tensor
) -> None:
    """Write to ``out`` (N, heads, D) each query's attention over the first ``lengths`` tokens of its pages.

    Keys and values are (all pages, tokens of a page, heads, D), in whatever order they lie; ``pages`` are
    (N, most pages). A row of length 0, which fills up a batch, gets zeros.
    """
    rows, heads, width = query.shape
    page, key_heads = keys.shape[1:3]
    _attend[(rows, key_heads)](
        query,
        keys,
        values,
        out,
        pages,
        lengths,
        scale * LOG2_E,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *out.stride()[:2],
        pages.stride(0),
        SHARED=heads // key_heads,
        QUERIES=LEAST_QUERIES,
        WIDTH=width,
        PAGE=page,
        BLOCK=BLOCK,
        num_warps=WARPS,
        num_stages=STAGES,
    )


@torch.no_grad()
def is_right(device: torch.device, dtype: torch.dtype, shared: int, width: int, page: int) -> bool:
    """Whether the kernel computes plain attention on this device. To be tried: compilers differ."""
    generator = torch.Generator(device=device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    rows, key_heads, most = 4, 2, 5
    query = noise(rows, key_heads * shared, width)
    keys, values = (noise(3 * most, page, key_heads, width) for _ in range(2))
    pages = torch.randperm(3 * most, generator=generator, device=device).int()[: rows * most // 2]
    pages = torch.cat([pages[:most], pages[:most], pages]).view(rows, most)  # the first two share theirs
    lengths = torch.tensor([1, 2 * page + 3, 0, most * page], dtype=torch.int32, device=device)
    found = torch.full_like(query, torch.nan)
    try:
        paged_attention(query, keys, values, pages, lengths, 0.2, found)
    except Exception:  # whatever it is, vLLM has another one
        return False
    expected = plain_attention(query, keys, values, pages, lengths, 0.2)
    return torch.allclose(found.float(), expected, atol=0.05)


def plain_attention(
    query: Tensor, keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """What :func:`paged_attention` computes, in float32 and row by row."""
    found = torch.zeros(query.shape, device=query.device)
    shared = query.shape[1] // keys.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length:
            seen = pages[row].long()
            mine, theirs = (
                states[seen].flatten(0, 1)[:length].float().repeat_interleave(shared, dim=1)
                for states in (keys, values)
            )
            weights = (torch.einsum("hd,lhd->hl", query[row].float(), mine) * scale).softmax(dim=-1)
            found[row] = torch.einsum("hl,lhd->hd", weights, theirs)
    return found


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    out,
    pages,
    lengths,
    scale,
    query_row,
    query_head,
    key_page,
    key_token,
    key_head,
    value_page,
    value_token,
    value_head,
    out_row,
    out_head,
    pages_row,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    widths = tl.arange(0, WIDTH)
    queries = tl.arange(0, QUERIES)
    is_query = queries[:, None] < SHARED
    heads = head * SHARED + queries[:, None]
    asked = tl.load(query + row * query_row + heads * query_head + widths[None, :], mask=is_query, other=0.0)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = places < length
        page = tl.load(pages + row * pages_row + places // PAGE, mask=seen, other=0).to(tl.int64)
        key_at = page * key_page + (places % PAGE) * key_token + head * key_head
        key = tl.load(keys + key_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(asked, tl.trans(key)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        value_at = page * value_page + (places % PAGE) * value_token + head * value_head
        value = tl.load(values + value_at[:, None] + widths[None, :], mask=seen[:, None], other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    place = out + row * out_row + heads * out_head + widths[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=is_query)
