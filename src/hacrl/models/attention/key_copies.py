"""Prefix sharing by copies: each sequence's attention gets a copy of its prompt's keys and values.

The keys and values of a shared prompt are computed once and copied to all responses. In the backward pass the
gradients of the copies are summed per token: on a GPU by a Triton kernel, after a trial that it is correct,
elsewhere by autograd.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hacrl.models.device import copy_to_device, current_device


class KeyCopies(NamedTuple):
    """Which token each copy is of and, if a kernel sums gradients, which copies each token has."""

    tokens: Tensor  # (copies,) the token that a copy is of
    order: Tensor | None = None  # (copies,) the copies sorted by token
    starts: Tensor | None = None  # (tokens + 1,) where in that order each token's copies begin


def plan_key_copies(copied_tokens: Tensor, num_tokens: int, device: torch.device) -> KeyCopies:
    """Return the copies of these tokens on a device. Every token has at least one copy, its own."""
    tokens = copy_to_device(copied_tokens, device)
    if device.type != "cuda" or not _sum_kernel_is_correct(device):
        return KeyCopies(tokens)
    order, starts = group_copies(copied_tokens, num_tokens)
    return KeyCopies(tokens, copy_to_device(order, device), copy_to_device(starts, device))


def group_copies(copied_tokens: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the copies sorted by token, (copies,), and where each token's begin, (tokens + 1,)."""
    starts = torch.zeros(num_tokens + 1, dtype=torch.long)
    starts[1:] = copied_tokens.bincount(minlength=num_tokens).cumsum(0)
    return copied_tokens.sort(stable=True).indices, starts


def copied_keys(states: Tensor, copies: KeyCopies) -> Tensor:
    """Return the copies of keys or values, (tokens, heads, D) -> (copies, heads, D)."""
    if copies.order is None or copies.starts is None:
        return states.index_select(0, copies.tokens)
    result: Tensor = torch.ops.hacrl.copy_keys(states, copies.tokens, copies.order, copies.starts)
    return result


def sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return the sum over each token's copies, added in float32; (copies, heads, D) -> (tokens, heads, D)."""
    counts = starts[1:] - starts[:-1]
    tokens = torch.arange(len(counts), device=copies.device).repeat_interleave(counts)
    out = torch.zeros(len(counts), *copies.shape[1:], dtype=torch.float32, device=copies.device)
    return out.index_add_(0, tokens, copies.index_select(0, order).float()).to(copies.dtype)


@torch.library.custom_op("hacrl::copy_keys", mutates_args=())
def _copy_keys(states: Tensor, tokens: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.index_select(0, tokens)


@_copy_keys.register_fake
def _(states: Tensor, tokens: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.new_empty(tokens.shape[0], *states.shape[1:])


@torch.library.custom_op("hacrl::sum_copies", mutates_args=())
def _sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    kernel = _sum_kernel() if copies.is_cuda else None
    return (kernel or sum_copies)(copies, order, starts)


@_sum_copies.register_fake
def _(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return copies.new_empty(starts.shape[0] - 1, *copies.shape[1:])


def _save_order(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hacrl.sum_copies(gradient, *ctx.saved_tensors), None, None, None


_copy_keys.register_autograd(_gradient, setup_context=_save_order)


@cache
def _sum_kernel() -> Any:
    """Return the Triton kernel, or None without Triton, which comes with torch for GPUs on Linux."""
    try:
        return import_module("hacrl.models.attention.kernels").sum_copies
    except ImportError:
        return None


@cache
@torch.no_grad()
def _sum_kernel_is_correct(device: torch.device) -> bool:
    """Return whether the kernel sums correctly on this device, found out by a trial: compilers differ."""
    kernel = _sum_kernel()
    if kernel is None:
        return False
    tokens = torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 1, 5])
    order, starts = (table.to(device) for table in group_copies(tokens, 6))
    copies = torch.randn(10, 3, 40, device=device).bfloat16()
    try:
        with current_device(device):
            sums = kernel(copies, order, starts)
    except Exception:  # whatever the error is, autograd sums the copies instead
        return False
    return torch.allclose(sums.float(), sum_copies(copies, order, starts).float(), atol=0.05)
