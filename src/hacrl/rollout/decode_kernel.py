"""Attention of one new token per response over its slot, as a kernel that reads the cache once.

General kernels are made for many queries at a time and read a cache at half of a GPU's bandwidth when there
is one query a head. Here a program has one response and one head of keys, with all query heads that share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_QUERIES = 16  # rows of the smallest matrix product
BLOCK = 64  # tokens of the cache at a time
ENOUGH_PROGRAMS = 512  # that keep a GPU busy; with fewer, a kernel that splits long responses is faster


def can_decode(query: Tensor, key_heads: int) -> bool:
    """Whether the kernel is made for these shapes and would be the faster one."""
    rows, heads, width = query.shape
    shared = heads // key_heads
    return rows * key_heads >= ENOUGH_PROGRAMS and width in (64, 128, 256) and shared <= LEAST_QUERIES


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    used: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """(N, heads, D): each query's attention over the first ``used`` tokens of its slot.

    The last of these is the new one, whose key and value are written into the slot first. With a ``window``
    that is not negative, only that many before the new one. Keys and values are (slots, length, heads, D).
    """
    rows, heads, width = query.shape
    key_heads = keys.shape[2]
    out = torch.empty(rows, heads, width, dtype=query.dtype, device=query.device)
    _decode[(rows, key_heads)](
        query,
        key,
        value,
        keys,
        values,
        out,
        slots,
        used,
        scale * 1.4426950408889634,  # the kernel's powers are those of 2
        window,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        out.stride(0),
        out.stride(1),
        SHARED=heads // key_heads,
        QUERIES=LEAST_QUERIES,
        WIDTH=width,
        BLOCK=BLOCK,
        WINDOWED=window >= 0,
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(  # type: ignore[no-untyped-def]
    query,
    new_key,
    new_value,
    keys,
    values,
    out,
    slots,
    used_tokens,
    scale,
    window,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    slot_stride,
    token_stride,
    head_stride,
    out_row,
    out_head,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    used = tl.load(used_tokens + row)
    base = tl.load(slots + row).to(tl.int64) * slot_stride + head * head_stride
    widths = tl.arange(0, WIDTH)
    last = base + (used - 1) * token_stride + widths
    tl.store(keys + last, tl.load(new_key + row * key_row + head * key_head + widths))
    tl.store(values + last, tl.load(new_value + row * value_row + head * value_head + widths))
    tl.debug_barrier()  # all threads of this program are about to read them
    shared = tl.arange(0, QUERIES)
    is_query = shared[:, None] < SHARED
    heads = head * SHARED + shared[:, None]
    asked = tl.load(query + row * query_row + heads * query_head + widths[None, :], mask=is_query, other=0.0)
    first = 0
    if WINDOWED:
        first = tl.maximum(used - 1 - window, 0)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range((first // BLOCK) * BLOCK, used, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = (places >= first) & (places < used)
        where = base + places[:, None] * token_stride + widths[None, :]
        key = tl.load(keys + where, mask=seen[:, None], other=0.0)
        scores = tl.dot(asked, tl.trans(key)) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - larger[:, None])
        shrunk = tl.exp2(largest - larger)
        value = tl.load(values + where, mask=seen[:, None], other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
    mixed = mixed / total[:, None]
    place = out + row * out_row + heads * out_head + widths[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=is_query)
