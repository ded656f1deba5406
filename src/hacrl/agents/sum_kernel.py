"""Gradients of what was handed out several times, added up as a kernel.

torch would sort all places in every layer, or add in 16 bits in any order. Who got what is known beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a token at a time


def sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """See :func:`hacrl.agents.shared_keys.sum_copies`."""
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
