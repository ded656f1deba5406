"""Keys handed out several times, and their gradients added up, as kernels.

torch would sort all places in every layer, or add in 16 bits in any order, and what several query heads make
of a key head it adds up at a fifth of a GPU's bandwidth. Who got what is known beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a token at a time


def sum_copies(copies: Tensor, order: Tensor | None, starts: Tensor | None, group: int = 1) -> Tensor:
    """See :func:`hacrl.agents.shared_keys.sum_copies`."""
    tokens = copies.shape[0] if starts is None else starts.shape[0] - 1
    heads, width = copies.shape[1] // group, copies.shape[2]
    out = torch.empty(tokens, heads, width, dtype=copies.dtype, device=copies.device)
    tile = _tile(heads, width)
    _sum_copies[(tokens, triton.cdiv(heads, tile[0]))](
        copies.contiguous(),
        order,
        starts,
        out,
        heads,
        group,
        width,
        *tile,
        starts is not None,
        num_warps=_warps(tile),
    )
    return out


def repeated(states: Tensor, places: Tensor | None, group: int) -> Tensor:
    """See :func:`hacrl.agents.shared_keys.repeated`."""
    tokens, heads, width = states.shape
    states = states if states.stride(2) == 1 else states.contiguous()
    copies = tokens if places is None else places.shape[0]
    out = torch.empty(copies, heads * group, width, dtype=states.dtype, device=states.device)
    tile = _tile(heads, width)
    _repeat[(copies, triton.cdiv(heads, tile[0]))](
        states,
        places,
        out,
        *states.stride()[:2],
        heads,
        group,
        width,
        *tile,
        places is not None,
        num_warps=_warps(tile),
    )
    return out


def _tile(heads: int, width: int) -> tuple[int, int]:
    """Heads and numbers of each that a program has, powers of two as compilers want them."""
    columns = triton.next_power_of_2(width)
    return max(1, min(triton.next_power_of_2(heads), BLOCK // columns)), columns


def _warps(tile: tuple[int, int]) -> int:
    """So many that a thread has 8 numbers: 16 bytes, the most that are read at a time."""
    return max(1, tile[0] * tile[1] // (32 * 8))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sum_copies(  # type: ignore[no-untyped-def]
    copies,
    order,
    starts,
    out,
    heads,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A program has a token and some heads of keys: all copies of it, and all query heads of these."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < heads) & (columns < WIDTH)
    here = rows * (GROUP * WIDTH) + columns  # of a key head's first query head, in a copy
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if SHARED:
        for place in range(tl.load(starts + token), tl.load(starts + token + 1)):
            copy = copies + tl.load(order + place).to(tl.int64) * (heads * (GROUP * WIDTH))
            for member in tl.static_range(GROUP):
                total += tl.load(copy + here + member * WIDTH, mask=inside, other=0.0).to(tl.float32)
    else:
        copy = copies + token * (heads * (GROUP * WIDTH))
        for member in tl.static_range(GROUP):
            total += tl.load(copy + here + member * WIDTH, mask=inside, other=0.0).to(tl.float32)
    there = out + token * (heads * WIDTH) + rows * WIDTH + columns
    tl.store(there, total.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _repeat(  # type: ignore[no-untyped-def]
    states,
    places,
    out,
    token_stride,
    head_stride,
    heads,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A program has a copy and some heads of keys, read once and written for every query head of theirs."""
    copy = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < heads) & (columns < WIDTH)
    token = tl.load(places + copy).to(tl.int64) if SHARED else copy
    found = tl.load(
        states + token * token_stride + rows.to(tl.int64) * head_stride + columns, mask=inside, other=0.0
    )
    there = out + copy * (heads * (GROUP * WIDTH)) + rows * (GROUP * WIDTH) + columns
    for member in tl.static_range(GROUP):
        tl.store(there + member * WIDTH, found, mask=inside)
