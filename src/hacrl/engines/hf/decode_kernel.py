"""A kernel for the attention of one new token per response over its slot of the cache.

General kernels are made for many queries at a time; with one query per head they read a cache at half of a
GPU's bandwidth. Here a program handles one response and one key head, with all query heads that share it, and
reads the cache once. Responses to one prompt read it from the same slot at about the same time, so that the
GPU's own cache serves all but the first.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_QUERIES = 16  # rows of the smallest matrix product on a GPU
BLOCK, WARPS, STAGES = 32, 2, 3  # tokens per block; the fastest of 27 choices on an H200
MIN_PROGRAMS = 512  # with fewer, a kernel that splits long responses is faster


def can_decode(query: Tensor, key_heads: int) -> bool:
    """Return whether the kernel supports these shapes and is the faster one."""
    rows, heads, width = query.shape
    heads_per_key = heads // key_heads
    return rows * key_heads >= MIN_PROGRAMS and width in (64, 128, 256) and heads_per_key <= MIN_QUERIES


@cache
@torch.no_grad()
def is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a trial on this device agrees with plain attention: compilers differ."""
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
    slots, prompt_slots = torch.tensor([2, 0, 3], device=device), torch.tensor([2, 1, 1], device=device)
    lengths = torch.tensor([1, 64, 150], dtype=torch.int32, device=device)
    prompt_lengths = torch.tensor([0, 63, 70], device=device)
    for states in (keys, values):
        states[0, :63], states[3, :70] = states[1, :63], states[1, :70]
    try:
        found = decode_attention(
            query, key, value, keys, values, slots, prompt_slots, prompt_lengths, lengths, 0.2, -1
        )
    except Exception:  # whatever the error is, there is another kernel
        return False
    for row in range(rows):
        visible = slots[row], slice(0, int(lengths[row]))
        row_keys, row_values = keys[visible].float(), values[visible].float()
        stored = torch.equal(row_keys[-1].to(dtype), key[row])
        if not stored or not torch.equal(row_values[-1].to(dtype), value[row]):
            return False
        row_keys, row_values = (
            states.repeat_interleave(heads // key_heads, dim=1) for states in (row_keys, row_values)
        )
        weights = (torch.einsum("hd,lhd->hl", query[row].float(), row_keys) * 0.2).softmax(dim=-1)
        expected = torch.einsum("hl,lhd->hd", weights, row_values)
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
    prompt_slots: Tensor,
    prompt_lengths: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Return each query's attention over the first ``lengths`` tokens of its slot, (N, heads, D).

    The last of these tokens is the new one; its key and value are written into the slot first. The first
    ``prompt_lengths`` tokens are also in the slot ``prompt_slots``, and are read there. A ``window`` that is
    not negative limits attention to that many tokens before the new one. ``keys`` and ``values`` are
    (slots, length, key heads, D).
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
        prompt_slots,
        prompt_lengths,
        lengths,
        scale * 1.4426950408889634,  # the kernel computes powers of 2
        window,
        keys.shape[1],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        KEY_HEADS=key_heads,
        HEADS_PER_KEY=heads // key_heads,
        QUERIES=MIN_QUERIES,
        WIDTH=width,
        BLOCK=BLOCK,
        WINDOWED=window >= 0,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store(states, target, new, row_stride, head_stride, row, head, widths):  # type: ignore[no-untyped-def]
    tl.store(states + target + widths, tl.load(new + row * row_stride + head * head_stride + widths))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _decode(  # type: ignore[no-untyped-def]
    query,
    new_key,
    new_value,
    keys,
    values,
    out,
    slots,
    prompt_slots,
    prompt_counts,
    token_counts,
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
    HEADS_PER_KEY: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    num_tokens = tl.load(token_counts + row)
    token_stride = KEY_HEADS * WIDTH  # stride from one token to the next
    base = tl.load(slots + row).to(tl.int64) * length * token_stride + head * WIDTH
    prompt_base = tl.load(prompt_slots + row).to(tl.int64) * length * token_stride + head * WIDTH
    num_prompt_tokens = tl.load(prompt_counts + row)
    widths = tl.arange(0, WIDTH)
    new_token = base + (num_tokens - 1) * token_stride
    _store(keys, new_token, new_key, key_row, key_head, row, head, widths)
    _store(values, new_token, new_value, value_row, value_head, row, head, widths)
    tl.debug_barrier()  # all threads of this program read them below
    queries = tl.arange(0, QUERIES)
    is_query = queries[:, None] < HEADS_PER_KEY
    heads = head * HEADS_PER_KEY + queries[:, None]
    query_addresses = query + row * query_row + heads * query_head + widths[None, :]
    query_block = tl.load(query_addresses, mask=is_query, other=0.0)
    first = tl.maximum(num_tokens - 1 - window, 0) if WINDOWED else 0
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    weighted = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range((first // BLOCK) * BLOCK, num_tokens, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        visible = (positions >= first) & (positions < num_tokens)
        addresses = (
            tl.where(positions < num_prompt_tokens, prompt_base, base)[:, None]
            + positions[:, None] * token_stride
            + widths[None, :]
        )
        key = tl.load(keys + addresses, mask=visible[:, None], other=0.0)
        scores = tl.where(visible[None, :], tl.dot(query_block, tl.trans(key)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        weights, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        value = tl.load(values + addresses, mask=visible[:, None], other=0.0)
        weighted = weighted * shrunk[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
    target = out + row * KEY_HEADS * HEADS_PER_KEY * WIDTH + heads * WIDTH + widths[None, :]
    tl.store(target, (weighted / total[:, None]).to(out.dtype.element_ty), mask=is_query)
