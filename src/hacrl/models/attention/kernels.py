"""Gradients of what was handed out several times, added up as a kernel.

torch would sort all places in every layer, or add in 16 bits in any order. Who got what is known beforehand.

Attention along branches, forward and backward, as kernels; see :mod:`hacrl.models.attention.tree_attention`.

A program has a tile of one sequence's tokens. Forward, and for the gradient of queries, the tokens look at
keys: those of the trunk that their sequence grows from, then their own. For the gradient of keys and values
they are looked at: by all tokens from themselves to the end of everything that grows from their sequence,
which stands right behind it. If those are many, programs share them, and what each finds is added up in
another kernel. So gradients of what is shared are added up in float32, and always in the same order.

With a window everything is computed all the same, and what is out of it is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hacrl.models.attention.tree import TILE, Tree

BLOCK = 1024  # numbers of a token at a time


def sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """See :func:`hacrl.models.attention.tree_attention.sum_copies`."""
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
    for place in range(tl.load(starts + token), tl.load(starts + token + 1)):
        copy = tl.load(order + place).to(tl.int64)
        total += tl.load(copies + copy * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


STEP, WARPS, STAGES = 32, 4, 3  # tokens of the other side at a time, and how; the fastest of 12 on an H200
LOG2_E = tl.constexpr(1.4426950408889634)  # the kernels' powers are those of 2
_ANY = ("window", "tokens")  # one kernel for all; else those divisible by 16 would have their own


def forward(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """What is seen, (tokens, heads, D), and the binary logarithm of all scores' sum, (heads, tokens)."""
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    _tree_forward[(heads * (tree.tiles.shape[0] // 2),)](
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
    tree: Tree,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    tokens, heads, _ = query.shape
    key_heads = key.shape[1]
    of_query, of_key, of_value = (
        torch.empty(states.shape, dtype=states.dtype, device=states.device) for states in (query, key, value)
    )
    means = torch.empty_like(sums)  # of what is given, weighted by what was seen
    given, numbers = (gradient, query, key, value), (scale, window, tokens)
    strides = [stride for states in (query, key, value, gradient) for stride in states.stride()[:2]]
    constants = _constants(query, key, window)
    _tree_of_queries[(heads * (tree.tiles.shape[0] // 2),)](
        *given, out, sums, means, of_query, *tree[:3], *numbers, heads, *strides, **constants
    )
    # of keys and of values, by those who look at the same ones
    parts = query.new_empty(2, tree.places, key_heads, TILE, constants["COLUMNS"], dtype=torch.float32)
    found = (of_key, of_value, *parts)
    _tree_of_keys[(key_heads * (tree.looks.shape[0] // 5),)](
        *given, sums, means, *found, tree.looks, tree.positions, *numbers, key_heads, *strides, **constants
    )
    sizes = {name: constants[name] for name in ("WIDTH", "COLUMNS", "TILE")}
    _tree_add_up[(key_heads * (tree.totals.shape[0] // 4),)](*found, tree.totals, scale, key_heads, **sizes)
    return of_query, of_key, of_value


def _constants(query: Tensor, key: Tensor, window: int) -> dict[str, Any]:
    """What kernels are compiled for."""
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
def _rows(states, places, exist, token_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(places, D), zeros where there is nothing."""
    columns = tl.arange(0, COLUMNS)[None, :]
    where = places.to(tl.int64)[:, None] * token_stride + columns
    return tl.load(states + where, mask=exist[:, None] & (columns < WIDTH), other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _put(states, found, places, exist, heads, head, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same backwards, into (tokens, heads, D)."""
    columns = tl.arange(0, COLUMNS)[None, :]
    where = (places.to(tl.int64)[:, None] * heads + head) * WIDTH + columns
    tl.store(states + where, found.to(states.dtype.element_ty), mask=exist[:, None] & (columns < WIDTH))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _own(sequences, tiles, tile, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile's tokens, which of them exist, its first, and what is known of its sequence."""
    first = tl.load(tiles + 2 * tile + 1)
    sequence = sequences + 5 * tl.load(tiles + 2 * tile)
    own, end = tl.load(sequence), tl.load(sequence + 1)
    trunk, trunk_end = tl.load(sequence + 2), tl.load(sequence + 3)
    rows = first + tl.arange(0, TILE)
    return rows, rows < end, first, own, end, trunk, trunk_end


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _looked_at(  # type: ignore[no-untyped-def]
    turn, rows, own, end, trunk, trunk_end, positions, row_positions, window,
    STEP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Keys of a turn, first the trunk's and then one's own: which of them exist, and what each row sees."""
    trunk_turns = tl.cdiv(trunk_end - trunk, STEP)
    is_trunk = turn < trunk_turns
    places = tl.where(is_trunk, trunk + turn * STEP, own + (turn - trunk_turns) * STEP) + tl.arange(0, STEP)
    exist = places < tl.where(is_trunk, trunk_end, end)
    seen = places[None, :] <= tl.where(is_trunk, trunk_end - 1, rows)[:, None]
    if WINDOWED:
        key_positions = tl.load(positions + places, mask=exist, other=0)
        seen &= row_positions[:, None] - key_positions[None, :] <= window
    return places, exist, seen


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _tree_forward(  # type: ignore[no-untyped-def]
    query, key, value, out, sums, sequences, tiles, positions, scale, window, tokens, heads, query_token,
    query_head, key_token, key_head, value_token, value_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    head, tile = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    rows, exist, first, own, end, trunk, trunk_end = _own(sequences, tiles, tile, TILE)
    row_positions = tl.load(positions + rows, mask=exist, other=0) if WINDOWED else rows
    asked = _rows(query + head * query_head, rows, exist, query_token, WIDTH, COLUMNS)
    keys, values = key + head // GROUP * key_head, value + head // GROUP * value_head
    scale *= LOG2_E
    largest = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mixed = tl.zeros([TILE, COLUMNS], tl.float32)
    turns = tl.cdiv(trunk_end - trunk, STEP) + tl.cdiv(tl.minimum(first + TILE, end) - own, STEP)
    for turn in range(turns):
        places, are, seen = _looked_at(
            turn, rows, own, end, trunk, trunk_end, positions, row_positions, window, STEP, WINDOWED
        )
        found = _rows(keys, places, are, key_token, WIDTH, COLUMNS)
        scores = tl.where(seen, tl.dot(asked, tl.trans(found)) * scale, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        if WINDOWED:  # nothing may have been seen yet
            larger = tl.maximum(larger, -1e30)
        weights, shrunk = tl.exp2(scores - larger[:, None]), tl.exp2(largest - larger)
        found = _rows(values, places, are, value_token, WIDTH, COLUMNS)
        mixed = tl.dot(weights.to(found.dtype), found, mixed * shrunk[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        largest = larger
    _put(out, mixed / total[:, None], rows, exist, heads, head, WIDTH, COLUMNS)
    tl.store(sums + head * tokens + rows, largest + tl.log2(total), mask=exist)


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _tree_of_queries(  # type: ignore[no-untyped-def]
    gradient, query, key, value, out, sums, means, of_query, sequences, tiles, positions, scale, window,
    tokens, heads, query_token, query_head, key_token, key_head, value_token, value_head, gradient_token,
    gradient_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """With weights p = 2^(s - sum): ds = p (dp - mean), where the mean is that of dp, weighted by p."""
    head, tile = (tl.program_id(0) % heads).to(tl.int64), tl.program_id(0) // heads
    rows, exist, first, own, end, trunk, trunk_end = _own(sequences, tiles, tile, TILE)
    row_positions = tl.load(positions + rows, mask=exist, other=0) if WINDOWED else rows
    asked = _rows(query + head * query_head, rows, exist, query_token, WIDTH, COLUMNS)
    given = _rows(gradient + head * gradient_head, rows, exist, gradient_token, WIDTH, COLUMNS)
    was_seen = _rows(out + head * WIDTH, rows, exist, heads * WIDTH, WIDTH, COLUMNS)
    mean = tl.sum(given.to(tl.float32) * was_seen.to(tl.float32), 1)
    here = head * tokens + rows
    tl.store(means + here, mean, mask=exist)
    total = tl.load(sums + here, mask=exist, other=0.0)
    keys, values = key + head // GROUP * key_head, value + head // GROUP * value_head
    found_gradient = tl.zeros([TILE, COLUMNS], tl.float32)
    turns = tl.cdiv(trunk_end - trunk, STEP) + tl.cdiv(tl.minimum(first + TILE, end) - own, STEP)
    for turn in range(turns):
        places, are, seen = _looked_at(
            turn, rows, own, end, trunk, trunk_end, positions, row_positions, window, STEP, WINDOWED
        )
        found = _rows(keys, places, are, key_token, WIDTH, COLUMNS)
        scores = tl.dot(asked, tl.trans(found)) * (scale * LOG2_E)
        weights = tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
        theirs = _rows(values, places, are, value_token, WIDTH, COLUMNS)
        inner = weights * (tl.dot(given, tl.trans(theirs)) - mean[:, None])
        found_gradient = tl.dot(inner.to(found.dtype), found, found_gradient)
    _put(of_query, found_gradient * scale, rows, exist, heads, head, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=_ANY)  # type: ignore[untyped-decorator, unused-ignore]
def _tree_of_keys(  # type: ignore[no-untyped-def]
    gradient, query, key, value, sums, means, of_key, of_value, key_parts, value_parts, looks, positions,
    scale, window, tokens, key_heads, query_token, query_head, key_token, key_head, value_token,
    value_head, gradient_token, gradient_head,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All that look at these keys, through every query head that shares them; transposed, keys first."""
    key_at, look = (tl.program_id(0) % key_heads).to(tl.int64), looks + 5 * (tl.program_id(0) // key_heads)
    own_places = tl.load(look) + tl.arange(0, TILE)
    exist = own_places < tl.load(look + 1)
    begin, reach, place = tl.load(look + 2), tl.load(look + 3), tl.load(look + 4)
    own_positions = tl.load(positions + own_places, mask=exist, other=0) if WINDOWED else own_places
    keys = _rows(key + key_at * key_head, own_places, exist, key_token, WIDTH, COLUMNS)
    values = _rows(value + key_at * value_head, own_places, exist, value_token, WIDTH, COLUMNS)
    found_key, found_value = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    turns = tl.cdiv(reach - begin, STEP)
    for turn in range(turns * GROUP):
        head = key_at * GROUP + turn // turns
        places = begin + turn % turns * STEP + tl.arange(0, STEP)
        are = places < reach  # others are given nothing, so that nothing comes of them
        here = head * tokens + places
        seen = own_places[:, None] <= places[None, :]
        if WINDOWED:
            row_positions = tl.load(positions + places, mask=are, other=0)
            seen &= row_positions[None, :] - own_positions[:, None] <= window
        asked = _rows(query + head * query_head, places, are, query_token, WIDTH, COLUMNS)
        scores = tl.dot(keys, tl.trans(asked)) * (scale * LOG2_E)
        total = tl.load(sums + here, mask=are, other=0.0)
        weights = tl.where(seen, tl.exp2(scores - total[None, :]), 0.0)
        given = _rows(gradient + head * gradient_head, places, are, gradient_token, WIDTH, COLUMNS)
        found_value = tl.dot(weights.to(given.dtype), given, found_value)
        mean = tl.load(means + here, mask=are, other=0.0)
        inner = weights * (tl.dot(values, tl.trans(given)) - mean[None, :])
        found_key = tl.dot(inner.to(asked.dtype), asked, found_key)
    if place < 0:
        _put(of_key, found_key * scale, own_places, exist, key_heads, key_at, WIDTH, COLUMNS)
        _put(of_value, found_value, own_places, exist, key_heads, key_at, WIDTH, COLUMNS)
    else:  # others look at them, too
        here = _part(place, key_heads, key_at, TILE, COLUMNS)
        tl.store(key_parts + here, found_key)
        tl.store(value_parts + here, found_value)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _part(place, key_heads, key_at, TILE: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the sum of a place stands."""
    rows = (place * key_heads + key_at) * TILE + tl.arange(0, TILE)
    return rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tree_add_up(  # type: ignore[no-untyped-def]
    of_key, of_value, key_parts, value_parts, totals, scale, key_heads,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What several programs have found of the same keys."""
    key_at, total = (tl.program_id(0) % key_heads).to(tl.int64), totals + 4 * (tl.program_id(0) // key_heads)
    own_places = tl.load(total) + tl.arange(0, TILE)
    exist = own_places < tl.load(total + 1)
    found_key, found_value = tl.zeros([TILE, COLUMNS], tl.float32), tl.zeros([TILE, COLUMNS], tl.float32)
    for place in range(tl.load(total + 2), tl.load(total + 3)):
        here = _part(place, key_heads, key_at, TILE, COLUMNS)
        found_key += tl.load(key_parts + here)
        found_value += tl.load(value_parts + here)
    _put(of_key, found_key * scale, own_places, exist, key_heads, key_at, WIDTH, COLUMNS)
    _put(of_value, found_value, own_places, exist, key_heads, key_at, WIDTH, COLUMNS)
