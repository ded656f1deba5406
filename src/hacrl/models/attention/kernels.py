"""Triton kernels for prefix sharing: sums of copied keys' gradients, and attention over prefix trees.

``sum_copies`` is for :mod:`hacrl.models.attention.key_copies`. torch would sort all indices in every layer,
or add in 16 bits in an arbitrary order; here each token's copies are known beforehand.

``forward`` and ``backward`` are for :mod:`hacrl.models.attention.tree_attention`. A program computes one tile
of a sequence's tokens.

- Outputs and query gradients: loop over the keys of the sequence's prefix, then over its own keys.
- Key and value gradients: loop over all queries that attend to the tile, from the tile itself to the end of
  the last sequence that shares it. These tokens are contiguous. If they are many, several programs compute
  partial sums, and another kernel adds the partial sums up in float32, always in the same order.

With a window, scores outside the window are computed and then masked.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hacrl.models.attention.prefix_tree import TILE, PrefixTree

BLOCK = 1024  # numbers of a token that one program sums


def sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """See :func:`hacrl.models.attention.key_copies.sum_copies`."""
    tokens, width = len(starts) - 1, copies[0].numel()
    out = torch.empty(tokens, *copies.shape[1:], dtype=copies.dtype, device=copies.device)
    _sum_copies[(tokens, triton.cdiv(width, BLOCK))](
        copies.contiguous(), order, starts, out, width, BLOCK=BLOCK
    )
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_copies(copies, order, starts, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for position in range(tl.load(starts + token), tl.load(starts + token + 1)):
        copy = tl.load(order + position).to(tl.int64)
        total += tl.load(copies + copy * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


# Keys (or queries) per loop iteration, warps and pipeline stages: the fastest of 12 settings on an H200.
STEP, WARPS, STAGES = 32, 4, 3
LOG2_E = tl.constexpr(1.4426950408889634)  # the kernels use powers of 2
_NOT_SPECIALISED = ("window", "tokens")  # else Triton would compile another kernel for multiples of 16


def forward(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return attention outputs, (tokens, heads, D), and the log-sum-exp of all scores, (heads, tokens).

    The log-sum-exp is a binary logarithm.
    """
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    _attention_outputs[(heads * (tree.tiles.shape[0] // 2),)](
        query,
        key,
        value,
        out,
        sums,
        *tree[:3],
        scale,
        window,
        tokens,
        heads,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        **_constants(query, key, window),
    )
    return out, sums


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    tree: PrefixTree,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    tokens, heads, _ = query.shape
    key_heads = key.shape[1]
    query_gradient, key_gradient, value_gradient = (
        torch.empty(states.shape, dtype=states.dtype, device=states.device) for states in (query, key, value)
    )
    means = torch.empty_like(sums)  # per query: the gradient of its weights, averaged with these weights
    states, numbers = (gradient, query, key, value), (scale, window, tokens)
    strides = [stride for each in (query, key, value, gradient) for stride in each.stride()[:2]]
    constants = _constants(query, key, window)
    _query_gradients[(heads * (tree.tiles.shape[0] // 2),)](
        *states, out, sums, means, query_gradient, *tree[:3], *numbers, heads, *strides, **constants
    )
    partial_sums = query.new_empty(
        2, tree.partial_sums, key_heads, TILE, constants["COLUMNS"], dtype=torch.float32
    )
    results = (key_gradient, value_gradient, *partial_sums)
    _key_gradients[(key_heads * (tree.key_tasks.shape[0] // 5),)](
        *states,
        sums,
        means,
        *results,
        tree.key_tasks,
        tree.positions,
        *numbers,
        key_heads,
        *strides,
        **constants,
    )
    sizes = {name: constants[name] for name in ("WIDTH", "COLUMNS", "TILE")}
    _add_partial_sums[(key_heads * (tree.reductions.shape[0] // 4),)](
        *results, tree.reductions, scale, key_heads, **sizes
    )
    return query_gradient, key_gradient, value_gradient


def _constants(query: Tensor, key: Tensor, window: int) -> dict[str, Any]:
    """Return the compile-time constants of the kernels."""
    width = query.shape[2]
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "WIDTH": width,
        "COLUMNS": triton.next_power_of_2(width),
        "WINDOWED": window >= 0,
        "TILE": TILE,
        "STEP": STEP,
        "num_warps": WARPS,
        "num_stages": STAGES,
    }


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_rows(states, rows, exist, token_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (rows, D), zeros where a row does not exist."""
    columns = tl.arange(0, COLUMNS)[None, :]
    offsets = rows.to(tl.int64)[:, None] * token_stride + columns
    return tl.load(states + offsets, mask=exist[:, None] & (columns < WIDTH), other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _store_rows(  # type: ignore[no-untyped-def]
    states, values, rows, exist, heads, head, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store (rows, D) into (tokens, heads, D), where a row exists."""
    columns = tl.arange(0, COLUMNS)[None, :]
    offsets = (rows.to(tl.int64)[:, None] * heads + head) * WIDTH + columns
    tl.store(states + offsets, values.to(states.dtype.element_ty), mask=exist[:, None] & (columns < WIDTH))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _load_tile(sequences, tiles, tile, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a tile's tokens, which of them exist, the first one, and the ends of its sequence and prefix."""
    first = tl.load(tiles + 2 * tile + 1)
    sequence = sequences + 5 * tl.load(tiles + 2 * tile)
    own, end = tl.load(sequence), tl.load(sequence + 1)
    prefix, prefix_end = tl.load(sequence + 2), tl.load(sequence + 3)
    rows = first + tl.arange(0, TILE)
    return rows, rows < end, first, own, end, prefix, prefix_end


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _key_block(  # type: ignore[no-untyped-def]
    block, rows, own, end, prefix, prefix_end, positions, row_positions, window,
    STEP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Return indices, existence and mask of a block's keys: first the prefix's, then the sequence's own."""
    prefix_blocks = tl.cdiv(prefix_end - prefix, STEP)
    is_prefix = block < prefix_blocks
    start = tl.where(is_prefix, prefix + block * STEP, own + (block - prefix_blocks) * STEP)
    columns = start + tl.arange(0, STEP)
    exist = columns < tl.where(is_prefix, prefix_end, end)
    visible = columns[None, :] <= tl.where(is_prefix, prefix_end - 1, rows)[:, None]
    if WINDOWED:
        key_positions = tl.load(positions + columns, mask=exist, other=0)
        visible &= row_positions[:, None] - key_positions[None, :] <= window
    return columns, exist, visible


@triton.jit(do_not_specialize=_NOT_SPECIALISED)  # type: ignore[untyped-decorator, unused-ignore]
def _attention_outputs(  # type: ignore[no-untyped-def]
    query, key, value, out, sums, sequences, tiles, positions, scale, window, tokens, heads, query_token,
    query_head, key_token, key_head, value_token, value_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, tile = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    rows, exist, first, own, end, prefix, prefix_end = _load_tile(sequences, tiles, tile, TILE)
    row_positions = tl.load(positions + rows, mask=exist, other=0) if WINDOWED else rows
    queries = _load_rows(query + head * query_head, rows, exist, query_token, WIDTH, COLUMNS)
    keys, values = key + head // GROUP * key_head, value + head // GROUP * value_head
    scale *= LOG2_E
    largest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    weighted = tl.zeros([TILE, COLUMNS], tl.float32)
    blocks = tl.cdiv(prefix_end - prefix, STEP) + tl.cdiv(tl.minimum(first + TILE, end) - own, STEP)
    for block in range(blocks):
        columns, valid, visible = _key_block(
            block, rows, own, end, prefix, prefix_end, positions, row_positions, window, STEP, WINDOWED
        )
        states = _load_rows(keys, columns, valid, key_token, WIDTH, COLUMNS)
        scores = tl.where(visible, tl.dot(queries, tl.trans(states)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        if WINDOWED:  # all scores so far may be masked
            larger = tl.maximum(larger, -1e30)
        weights, rescale = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        states = _load_rows(values, columns, valid, value_token, WIDTH, COLUMNS)
        weighted = tl.dot(weights.to(states.dtype), states, weighted * rescale[:, None])
        total = total * rescale + tl.sum(weights, 1)
        largest = larger
    _store_rows(out, weighted / total[:, None], rows, exist, heads, head, WIDTH, COLUMNS)
    tl.store(sums + head * tokens + rows, largest + tl.log2(total), mask=exist)


@triton.jit(do_not_specialize=_NOT_SPECIALISED)  # type: ignore[untyped-decorator, unused-ignore]
def _query_gradients(  # type: ignore[no-untyped-def]
    gradient, query, key, value, out, sums, means, query_gradient, sequences, tiles, positions, scale, window,
    tokens, heads, query_token, query_head, key_token, key_head, value_token, value_head, gradient_token,
    gradient_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """With weights p = 2^(s - sum): ds = p (dp - mean), where mean is the average of dp, weighted by p."""
    head, tile = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    rows, exist, first, own, end, prefix, prefix_end = _load_tile(sequences, tiles, tile, TILE)
    row_positions = tl.load(positions + rows, mask=exist, other=0) if WINDOWED else rows
    queries = _load_rows(query + head * query_head, rows, exist, query_token, WIDTH, COLUMNS)
    out_gradients = _load_rows(gradient + head * gradient_head, rows, exist, gradient_token, WIDTH, COLUMNS)
    outs = _load_rows(out + head * WIDTH, rows, exist, heads * WIDTH, WIDTH, COLUMNS)
    mean = tl.sum(out_gradients.to(tl.float32) * outs.to(tl.float32), 1)
    offsets = head * tokens + rows
    tl.store(means + offsets, mean, mask=exist)
    total = tl.load(sums + offsets, mask=exist, other=0.0)
    keys, values = key + head // GROUP * key_head, value + head // GROUP * value_head
    result = tl.zeros([TILE, COLUMNS], tl.float32)
    blocks = tl.cdiv(prefix_end - prefix, STEP) + tl.cdiv(tl.minimum(first + TILE, end) - own, STEP)
    for block in range(blocks):
        columns, valid, visible = _key_block(
            block, rows, own, end, prefix, prefix_end, positions, row_positions, window, STEP, WINDOWED
        )
        key_states = _load_rows(keys, columns, valid, key_token, WIDTH, COLUMNS)
        scores = tl.dot(queries, tl.trans(key_states)) * (scale * LOG2_E)
        weights = tl.where(visible, tl.exp2(scores - total[:, None]), 0.0)
        value_states = _load_rows(values, columns, valid, value_token, WIDTH, COLUMNS)
        score_gradients = weights * (tl.dot(out_gradients, tl.trans(value_states)) - mean[:, None])
        result = tl.dot(score_gradients.to(key_states.dtype), key_states, result)
    _store_rows(query_gradient, result * scale, rows, exist, heads, head, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=_NOT_SPECIALISED)  # type: ignore[untyped-decorator, unused-ignore]
def _key_gradients(  # type: ignore[no-untyped-def]
    gradient, query, key, value, sums, means, key_gradient, value_gradient, key_parts, value_parts, tasks,
    positions, scale, window, tokens, key_heads, query_token, query_head, key_token, key_head, value_token,
    value_head, gradient_token, gradient_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sum over the queries of a task and the query heads that share the key head; scores: (keys, queries)."""
    key_head_id, task = (
        (tl.program_id(0) % key_heads).to(tl.int64),
        tasks + 5 * (tl.program_id(0) // key_heads),
    )
    rows = tl.load(task) + tl.arange(0, TILE)
    exist = rows < tl.load(task + 1)
    begin, until, partial_sum = tl.load(task + 2), tl.load(task + 3), tl.load(task + 4)
    row_positions = tl.load(positions + rows, mask=exist, other=0) if WINDOWED else rows
    keys = _load_rows(key + key_head_id * key_head, rows, exist, key_token, WIDTH, COLUMNS)
    values = _load_rows(value + key_head_id * value_head, rows, exist, value_token, WIDTH, COLUMNS)
    key_sum, value_sum = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    blocks = tl.cdiv(until - begin, STEP)
    for block in range(blocks * GROUP):
        head = key_head_id * GROUP + block // blocks
        columns = begin + block % blocks * STEP + tl.arange(0, STEP)
        valid = columns < until  # other queries load zero gradients, so that they contribute nothing
        offsets = head * tokens + columns
        visible = rows[:, None] <= columns[None, :]
        if WINDOWED:
            query_positions = tl.load(positions + columns, mask=valid, other=0)
            visible &= query_positions[None, :] - row_positions[:, None] <= window
        queries = _load_rows(query + head * query_head, columns, valid, query_token, WIDTH, COLUMNS)
        scores = tl.dot(keys, tl.trans(queries)) * (scale * LOG2_E)
        total = tl.load(sums + offsets, mask=valid, other=0.0)
        weights = tl.where(visible, tl.exp2(scores - total[None, :]), 0.0)
        out_gradients = _load_rows(
            gradient + head * gradient_head, columns, valid, gradient_token, WIDTH, COLUMNS
        )
        value_sum = tl.dot(weights.to(out_gradients.dtype), out_gradients, value_sum)
        mean = tl.load(means + offsets, mask=valid, other=0.0)
        score_gradients = weights * (tl.dot(values, tl.trans(out_gradients)) - mean[None, :])
        key_sum = tl.dot(score_gradients.to(queries.dtype), queries, key_sum)
    if partial_sum < 0:
        _store_rows(key_gradient, key_sum * scale, rows, exist, key_heads, key_head_id, WIDTH, COLUMNS)
        _store_rows(value_gradient, value_sum, rows, exist, key_heads, key_head_id, WIDTH, COLUMNS)
    else:  # other tasks have queries of the same keys
        part = _partial_sum_offsets(partial_sum, key_heads, key_head_id, TILE, COLUMNS)
        tl.store(key_parts + part, key_sum)
        tl.store(value_parts + part, value_sum)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _partial_sum_offsets(number, key_heads, key_head_id, TILE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of a tile's partial sum."""
    rows = (number * key_heads + key_head_id) * TILE + tl.arange(0, TILE)
    return rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_partial_sums(  # type: ignore[no-untyped-def]
    key_gradient, value_gradient, key_parts, value_parts, reductions, scale, key_heads,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of the key and value gradients of one tile."""
    key_head_id = (tl.program_id(0) % key_heads).to(tl.int64)
    reduction = reductions + 4 * (tl.program_id(0) // key_heads)
    rows = tl.load(reduction) + tl.arange(0, TILE)
    exist = rows < tl.load(reduction + 1)
    key_sum, value_sum = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    for number in range(tl.load(reduction + 2), tl.load(reduction + 3)):
        part = _partial_sum_offsets(number, key_heads, key_head_id, TILE, COLUMNS)
        key_sum += tl.load(key_parts + part)
        value_sum += tl.load(value_parts + part)
    _store_rows(key_gradient, key_sum * scale, rows, exist, key_heads, key_head_id, WIDTH, COLUMNS)
    _store_rows(value_gradient, value_sum, rows, exist, key_heads, key_head_id, WIDTH, COLUMNS)
