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
    if device.type != "cuda" or not kernels_are_right(device):
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


def repeated(states: Tensor, places: Tensor | None, group: int) -> Tensor:
    """Copies of tokens for everybody who sees them, if places say who, with every head as often as told.

    (tokens, heads, D) -> (copies, heads * group, D); not for autograd.
    """
    if group == 1:
        return states if places is None else states.index_select(0, places)
    kernels = _kernels() if states.is_cuda else None
    if kernels is not None:
        copies: Tensor = kernels.repeated(states, places, group)
        return copies
    return (states if places is None else states.index_select(0, places)).repeat_interleave(group, dim=1)


def added_up(copies: Tensor, order: Tensor | None, starts: Tensor | None, group: int) -> Tensor:
    """:func:`sum_copies`, on a GPU by a kernel; not for autograd."""
    if starts is None and group == 1:
        return copies
    kernels = _kernels() if copies.is_cuda else None
    add = sum_copies if kernels is None else kernels.sum_copies
    total: Tensor = add(copies, order, starts, group)
    return total


def sum_copies(copies: Tensor, order: Tensor | None, starts: Tensor | None, group: int = 1) -> Tensor:
    """The sum of each token's copies and, in these, of every so many heads side by side; in float32.

    (copies, heads * group, D) -> (tokens, heads, D); without an order, each token has one copy.
    """
    rows, heads, width = copies.shape
    total = copies.float().reshape(rows, heads // group, group, width).sum(2)
    if order is not None and starts is not None:
        counts = starts[1:] - starts[:-1]
        tokens = torch.arange(len(counts), device=copies.device).repeat_interleave(counts)
        summed = torch.zeros(len(counts), *total.shape[1:], device=copies.device)
        total = summed.index_add_(0, tokens, total.index_select(0, order))
    return total.to(copies.dtype)


@torch.library.custom_op("hacrl::hand_out", mutates_args=())
def _hand_out(states: Tensor, places: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.index_select(0, places)


@_hand_out.register_fake
def _(states: Tensor, places: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return states.new_empty(places.shape[0], *states.shape[1:])


@torch.library.custom_op("hacrl::sum_copies", mutates_args=())
def _sum_copies(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return added_up(copies, order, starts, 1)


@_sum_copies.register_fake
def _(copies: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return copies.new_empty(starts.shape[0] - 1, *copies.shape[1:])


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hacrl.sum_copies(gradient, *ctx.saved_tensors), None, None, None


_hand_out.register_autograd(_gradient, setup_context=_keep)


@cache
def _kernels() -> Any:
    """Ours, where there is Triton, which comes with torch for GPUs on Linux."""
    try:
        return import_module("hacrl.agents.sum_kernel")
    except ImportError:
        return None


@cache
@torch.no_grad()
def kernels_are_right(device: torch.device) -> bool:
    """Whether they hand out and add up on this device. Tried, once: compilers differ."""
    kernels = _kernels()
    if kernels is None:
        return False
    places = torch.tensor([0, 1, 2, 0, 1, 3, 4, 0, 1, 5])
    order, starts = (one.to(device) for one in backwards(places, 6))
    places = places.to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    states, copies = (
        torch.randn(count, 6, 40, generator=generator, device=device).bfloat16() for count in (6, 10)
    )
    for group, seen in ((1, places), (3, places), (2, None)):
        way_back: tuple[Tensor | None, Tensor | None] = (None, None) if seen is None else (order, starts)
        try:
            with as_current(device):
                total = kernels.sum_copies(copies, *way_back, group)
                repeats = kernels.repeated(states, seen, group)
        except Exception:  # whatever it is, there is another way
            return False
        expected = sum_copies(copies, *way_back, group)
        if not torch.allclose(total.float(), expected.float(), rtol=0.02, atol=0.05):
            return False
        one_each = states if seen is None else states[seen]
        if not torch.equal(repeats, one_each.repeat_interleave(group, dim=1)):
            return False
    return True
