"""Attention of one new token per response over vLLM's pages of keys and values.

The counterpart of :mod:`hacrl.rollout.decode_kernel` for a cache in pages. A program has one head of keys,
with all query heads that share it, and as many responses beside each other as the smallest matrix product has
room for: what these begin with, as responses to one prompt do, is read once for all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hacrl.rollout.vllm.paged_kernels import attend

LEAST_QUERIES = 16  # rows of the smallest matrix product


class Way(NamedTuple):
    """How a program goes about it."""

    block: int  # tokens at a time
    warps: int
    stages: int = 3


WAY = Way(32, 2)  # the fastest of 18 on an H200, with one response and with four
MOST_TOGETHER = 4  # 8 are no faster, and are more often responses to different prompts
# Where it is the faster one: with enough pairs of response and head of keys to keep a GPU busy, and with
# short contexts. FlashAttention reads long ones at the full bandwidth, and splits one longer than the others.
ENOUGH_PAIRS, LONGEST = 1024, 1024
ENOUGH_PROGRAMS = 256  # about two for each processor of an H200
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
        and rows * key_heads >= ENOUGH_PAIRS
        and longest <= LONGEST
        and width in (64, 128, 256)
        and heads // key_heads <= LEAST_QUERIES
        and page & (page - 1) == 0
        and all(states.stride(-1) == 1 for states in (query, keys, values, pages, lengths, out))
    )


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    out: Tensor,
    group: int | None = None,
) -> None:
    """Write to ``out`` (N, heads, D) each query's attention over the first ``lengths`` tokens of its pages.

    Keys and values are (all pages, tokens of a page, heads, D), in whatever order they lie; ``pages`` are
    (N, most pages). A row of length 0, which fills up a batch, gets zeros. ``group``: responses of a program,
    a power of 2.
    """
    rows, heads, width = query.shape
    page, key_heads = keys.shape[1:3]
    group = group or responses_together(heads // key_heads, rows * key_heads)
    attend[(-(-rows // group), key_heads)](
        query,
        keys,
        values,
        out,
        pages,
        lengths,
        scale * LOG2_E,
        rows,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *out.stride()[:2],
        pages.stride(0),
        SHARED=heads // key_heads,
        QUERIES=LEAST_QUERIES,
        GROUP=group,
        WIDTH=width,
        PAGE=page,
        MOST_PAGES=max(1, LONGEST // page),
        BLOCK=WAY.block,
        num_warps=WAY.warps,
        num_stages=WAY.stages,
    )


def responses_together(shared: int, pairs: int) -> int:
    """How many responses a program has, of so many pairs of response and head of keys: a power of 2.

    Their queries, ``shared`` of each, fit into one matrix product, and there are enough programs.
    """
    most = min(LEAST_QUERIES // shared, MOST_TOGETHER, pairs // ENOUGH_PROGRAMS)
    return 1 << max(1, most).bit_length() - 1


@torch.no_grad()
def is_right(
    device: torch.device, dtype: torch.dtype, shared: int, width: int, page: int, group: int
) -> bool:
    """Whether the kernel computes plain attention on this device. To be tried: compilers differ."""
    generator = torch.Generator(device=device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    key_heads, most = 2, 5
    rows = 3 * group + 1
    half = group + group // 2
    query = noise(rows, key_heads * shared, width)
    keys, values = (noise(rows * most, page, key_heads, width) for _ in range(2))
    pages = torch.randperm(rows * most, generator=generator, device=device).int().view(rows, most)
    own = pages.clone()
    pages[:group, :2] = own[0, :2]  # a group that shares two,
    pages[group : 2 * group, :1] = own[group, :1]  # one that shares the first, halves of it two more,
    pages[group:half, 1:3] = own[group, 1:3]
    pages[half : 2 * group, 1:3] = own[half, 1:3]
    lengths = torch.full((rows,), most * page - 1, dtype=torch.int32, device=device)
    numbers = torch.arange(group, device=device)
    lengths[:group], lengths[group : 2 * group] = 2 * page + numbers, 3 * page + 1 + numbers
    lengths[2 * group :: 2] = 1  # one that shares nothing, and a rest
    lengths[-2] = 0
    found = torch.full_like(query, torch.nan)
    try:
        paged_attention(query, keys, values, pages, lengths, 0.2, found, group)
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
