"""Keys and values of a prompt handed to the attention of all its responses, and their gradients added up."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hacrl.agents.current_device import as_current
from hacrl.agents.upload import upload


class Shared(NamedTuple):
    """Which token's keys stand where and, where gradients are added up by a kernel, the same backwards."""

    places: Tensor  # (copies,) a token's place, as often as somebody sees it
    order: Tensor | None = None  # (copies,) the copies sorted by token
    starts: Tensor | None = None  # (tokens + 1,) where in that order a token's copies begin


def share(places: Tensor, tokens: int, device: torch.device) -> Shared:
    """For this device; every one of the tokens is seen by somebody, itself at least."""
    if device.type != "cuda" or not _kernel_is_right(device):
        return Shared(upload(places, device))
    return Shared(upload(places, device), *(upload(tensor, device) for tensor in backwards(places, tokens)))


def backwards(places: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """See :class:`Shared`."""
    starts = torch.zeros(tokens + 1, dtype=torch.long)
    starts[1:] = places.bincount(minlength=tokens).cumsum(0)
    return places.sort(stable=True).indices, starts


def handed_out(states: Tensor, shared: Shared) -> Tensor:
    """A copy for everybody who sees a token; (tokens, heads, D) -> (copies, heads, D)."""
    if shared.order is None or shared.starts is None:
        return states.index_select(0, shared.places)
    copies: Tensor = torch.ops.hacrl.hand_out(states, shared.places, shared.order, shared.starts)
    return copies


def sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """The sum of each token's copies, in float32."""
    counts = starts[1:] - starts[:-1]
    tokens = torch.arange(len(counts), device=copies.device).repeat_interleave(counts)
    out = torch.zeros(len(counts), *copies.shape[1:], dtype=torch.float32, device=copies.device)
    return out.index_add_(0, tokens, copies.index_select(0, order).float()).to(copies.dtype)


@torch.library.custom_op("hacrl::hand_out", mutates_args=())
def _hand_out(states: Tensor, places: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.index_select(0, places)


@_hand_out.register_fake
def _(states: Tensor, places: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.new_empty(places.shape[0], *states.shape[1:])


@torch.library.custom_op("hacrl::sum_copies", mutates_args=())
def _sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    kernel = _kernel() if copies.is_cuda else None
    return (kernel or sum_copies)(copies, order, starts)


@_sum_copies.register_fake
def _(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return copies.new_empty(starts.shape[0] - 1, *copies.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hacrl.sum_copies(gradient, *ctx.saved_tensors), None, None, None


_hand_out.register_autograd(_gradient, setup_context=_keep)


@cache
def _kernel() -> Any:
    """Ours, where there is Triton, which comes with torch for GPUs on Linux."""
    try:
        return import_module("hacrl.agents.sum_kernel").sum_copies
    except ImportError:
        return None


@cache
@torch.no_grad()
def _kernel_is_right(device: torch.device) -> bool:
    """Whether it adds up on this device. Tried, once: compilers differ."""
    kernel = _kernel()
    if kernel is None:
        return False
    order, starts = (one.to(device) for one in backwards(torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 1, 5]), 6))
    copies = torch.randn(10, 3, 40, device=device).bfloat16()
    try:
        with as_current(device):
            found = kernel(copies, order, starts)
    except Exception:  # whatever it is, there is another way
        return False
    return torch.allclose(found.float(), sum_copies(copies, order, starts).float(), atol=0.05)
