"""Keys and values of a prompt handed to the attention of all its responses, and their gradients added up.

Causal attention in a tree: of sequences laid end to end, several of which may grow from one.

Responses read their prompt's keys and values where these are, nothing is copied for anybody, and gradients of
what is shared are added up where they arise. On a GPU that is done by kernels of ours, once a trial has shown
that they are right; on a CPU, where only tests come here, plainly.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hacrl.models.attention import reference as tree_plain
from hacrl.models.attention.tree import Tree, plant
from hacrl.models.device import as_current, is_out_of_memory, upload


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


def _save_order(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.hacrl.sum_copies(gradient, *ctx.saved_tensors), None, None, None


_hand_out.register_autograd(_gradient, setup_context=_save_order)


@cache
def _kernel() -> Any:
    """Ours, where there is Triton, which comes with torch for GPUs on Linux."""
    try:
        return import_module("hacrl.models.attention.kernels").sum_copies
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


MOST_WIDTH = 128  # of a head; wider ones would not fit a GPU's registers


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float, window: int
) -> Tensor:
    """What each token sees, (tokens, heads, D).

    There may be fewer heads of keys and values: each is for several of queries, side by side. With a window
    that is not negative, a token sees only so many before itself.
    """
    out: Tensor = torch.ops.hacrl.tree_attention(query, key, value, *tree, scale, window)[0]
    return out


@torch.library.custom_op("hacrl::tree_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Tensor,
    tiles: Tensor,
    positions: Tensor,
    looks: Tensor,
    totals: Tensor,
    places: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    states = [_dense(one) for one in (query, key, value)]
    found: tuple[Tensor, Tensor] = _functions(query).forward(
        *states, Tree(sequences, tiles, positions, looks, totals, places), scale, window
    )
    return found


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Tensor,
    tiles: Tensor,
    positions: Tensor,
    looks: Tensor,
    totals: Tensor,
    places: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("hacrl::tree_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    sequences: Tensor,
    tiles: Tensor,
    positions: Tensor,
    looks: Tensor,
    totals: Tensor,
    places: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    states = [_dense(one) for one in (gradient, query, key, value, out)]
    found: tuple[Tensor, Tensor, Tensor] = _functions(query).backward(
        *states, sums, Tree(sequences, tiles, positions, looks, totals, places), scale, window
    )
    return found


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    sequences: Tensor,
    tiles: Tensor,
    positions: Tensor,
    looks: Tensor,
    totals: Tensor,
    places: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (states.new_empty(states.shape) for states in (query, key, value))
    return of_query, of_key, of_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, places, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.told = (places, scale, window)


def _gradients(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.hacrl.tree_attention_backward(gradient, *ctx.saved_tensors, *ctx.told)
    return (*found, *[None] * 8)


_attend.register_autograd(_gradients, setup_context=_keep)


def _dense(states: Tensor) -> Tensor:
    """The numbers of a head side by side, as the kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _functions(states: Tensor) -> Any:
    return tree_plain if states.device.type == "cpu" else _kernels()


@cache
def _kernels() -> Any:
    """Ours, where there is Triton, which comes with torch for GPUs on Linux."""
    try:
        return import_module("hacrl.models.attention.kernels")
    except ImportError:
        return None


@cache
@torch.no_grad()
def kernels_are_right(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, window: int
) -> bool:
    """Whether they compute attention, and its gradients, of such heads on this device. Tried, once."""
    if _kernels() is None or width > MOST_WIDTH or heads % key_heads:
        return False
    # a prompt of 70 tokens with responses of 500, 1, 65 and 560, and a sequence of 5 by itself
    lengths = torch.tensor([70, 500, 1, 65, 560, 5])
    trunk_lengths = torch.tensor([0, 70, 70, 70, 70, 0])
    tree = plant(lengths.cumsum(0) - lengths, lengths, torch.zeros_like(lengths), trunk_lengths)
    told = 0.1, window if window < 0 else 30
    generator = torch.Generator().manual_seed(0)
    group = heads // key_heads
    given = [
        torch.randn(int(lengths.sum()), count, width, generator=generator).to(dtype)
        for count in (2 * group, 2 * group, 2, 2)
    ]
    try:
        with as_current(device):
            there = tree.moved(lambda part: part.to(device))
            found = _with_gradients(_kernels(), [one.to(device) for one in given], there, *told)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # that says nothing of the kernels
        return False  # whatever it is, there is another way
    exact = _with_gradients(tree_plain, given, tree, *told)
    return all(_is_close(one.cpu().float(), other.float()) for one, other in zip(found, exact, strict=True))


def _with_gradients(
    functions: Any, given: list[Tensor], tree: Tree, scale: float, window: int
) -> list[Tensor]:
    gradient, *states = given
    out, sums = functions.forward(*states, tree, scale, window)
    return [out, *functions.backward(gradient, *states, out, sums, tree, scale, window)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    """On average, and in every token and every head; of single numbers in 16 bits some are always far off."""
    far, usual = (one - other).abs(), other.abs().mean()
    whole, tokens, heads = far.mean(), far.mean((1, 2)).max(), far.mean((0, 2)).max()
    return bool(whole <= 0.02 * usual and tokens <= 0.2 * usual and heads <= 0.05 * usual)
