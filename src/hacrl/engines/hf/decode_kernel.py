"""Attention of one new token per response over its slot, as a kernel that reads the cache once.

General kernels are made for many queries at a time and read a cache at half of a GPU's bandwidth when there
is one query a head. Here a program has one response and one head of keys, with all query heads that share it.
Responses to one prompt read it from the same slot, at about the same time: memory is asked for it once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_QUERIES = 16  # rows of the smallest matrix product
BLOCK, WARPS, STAGES = 32, 2, 3  # tokens of the cache at a time, and how; the fastest of 27 on an H200
ENOUGH_PROGRAMS = 512  # that keep a GPU busy; with fewer, a kernel that splits long responses is faster


def can_decode(query: Tensor, key_heads: int) -> bool:
    """Whether the kernel is made for these shapes and would be the faster one."""
    rows, heads, width = query.shape
    shared = heads // key_heads
    return rows * key_heads >= ENOUGH_PROGRAMS and width in (64, 128, 256) and shared <= LEAST_QUERIES


@cache
@torch.no_grad()
def is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel computes plain attention on this device. Tried, once: compilers differ."""
    generator = torch.Generator(device=device).manual_seed(0)
    rows, length, heads, key_heads, width = 3, 150, 4, 2, 64
    query, key, value = (
        torch.randn(rows, count, width, generator=generator, device=device).to(dtype)
        for count in (heads, key_heads, key_heads)
    )
    keys, values = (
        torch.randn(rows + 1, length, key_heads, width, generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    slots, hosts = torch.tensor([2, 0, 3], device=device), torch.tensor([2, 1, 1], device=device)
    used = torch.tensor([1, 64, 150], dtype=torch.int32, device=device)
    shared = torch.tensor([0, 63, 70], device=device)
    for states in (keys, values):
        states[0, :63], states[3, :70] = states[1, :63], states[1, :70]
    try:
        found = decode_attention(query, key, value, keys, values, slots, hosts, shared, used, 0.2, -1)
    except Exception:  # whatever it is, there is another kernel
        return False
    for row in range(rows):
        seen = slots[row], slice(0, int(used[row]))
        mine, theirs = keys[seen].float(), values[seen].float()
        if not torch.equal(mine[-1].to(dtype), key[row]) or not torch.equal(theirs[-1].to(dtype), value[row]):
            return False
        mine, theirs = (states.repeat_interleave(heads // key_heads, dim=1) for states in (mine, theirs))
        weights = (torch.einsum("hd,lhd->hl", query[row].float(), mine) * 0.2).softmax(dim=-1)
        expected = torch.einsum("hl,lhd->hd", weights, theirs)
        if not torch.allclose(found[row].float(), expected, atol=0.05):
            return False
    return True


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    hosts: Tensor,
    shared: Tensor,
    used: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """(N, heads, D): each query's attention over the first ``used`` tokens of its slot.

    The last of these is the new one, whose key and value are written into the slot first. The first
    ``shared`` ones stand in the slot ``hosts`` as well, and are read there. With a ``window`` that is not
    negative, only that many before the new one. Keys and values are (slots, length, heads, D).
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
        hosts,
        shared,
        used,
        scale * 1.4426950408889634,  # the kernel's powers are those of 2
        window,
        keys.shape[1],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        KEY_HEADS=key_heads,
        SHARED=heads // key_heads,
        QUERIES=LEAST_QUERIES,
        WIDTH=width,
        BLOCK=BLOCK,
        WINDOWED=window >= 0,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(states, place, new, row_stride, head_stride, row, head, widths):  # type: ignore[no-untyped-def]
    tl.store(states + place + widths, tl.load(new + row * row_stride + head * head_stride + widths))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(  # type: ignore[no-untyped-def]
    query,
    new_key,
    new_value,
    keys,
    values,
    out,
    slots,
    hosts,
    shared_tokens,
    used_tokens,
    scale,
    window,
    length,
    query_row,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    KEY_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    used = tl.load(used_tokens + row)
    token = KEY_HEADS * WIDTH  # from one token's keys to the next's
    base = tl.load(slots + row).to(tl.int64) * length * token + head * WIDTH
    host = tl.load(hosts + row).to(tl.int64) * length * token + head * WIDTH
    shared = tl.load(shared_tokens + row)
    widths = tl.arange(0, WIDTH)
    _store(keys, base + (used - 1) * token, new_key, key_row, key_head, row, head, widths)
    _store(values, base + (used - 1) * token, new_value, value_row, value_head, row, head, widths)
    tl.debug_barrier()  # all threads of this program are about to read them
    queries = tl.arange(0, QUERIES)
    is_query = queries[:, None] < SHARED
    heads = head * SHARED + queries[:, None]
    asked = tl.load(query + row * query_row + heads * query_head + widths[None, :], mask=is_query, other=0.0)
    first = tl.maximum(used - 1 - window, 0) if WINDOWED else 0
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range((first // BLOCK) * BLOCK, used, BLOCK):
        places = start + tl.arange(0, BLOCK)
        seen = (places >= first) & (places < used)
        where = tl.where(places < shared, host, base)[:, None] + places[:, None] * token + widths[None, :]
        key = tl.load(keys + where, mask=seen[:, None], other=0.0)
        scores = tl.where(seen[None, :], tl.dot(asked, tl.trans(key)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        value = tl.load(values + where, mask=seen[:, None], other=0.0)
        mixed = mixed * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
    place = out + row * KEY_HEADS * SHARED * WIDTH + heads * WIDTH + widths[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=is_query)
