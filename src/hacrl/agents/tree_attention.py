"""Causal attention in a tree: of sequences laid end to end, several of which may grow from one.

Responses read their prompt's keys and values where these are, nothing is copied for anybody, and gradients of
what is shared are added up where they arise. On a GPU that is done by kernels of ours, once a trial has shown
that they are right; on a CPU, where only tests come here, plainly.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hacrl.agents import tree_plain
from hacrl.agents.current_device import as_current
from hacrl.agents.tree import Tree, plant

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
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    states = [_dense(one) for one in (query, key, value)]
    found: tuple[Tensor, Tensor] = _functions(query).forward(
        *states, Tree(sequences, tiles, positions), scale, window
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
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    states = [_dense(one) for one in (gradient, query, key, value, out)]
    found: tuple[Tensor, Tensor, Tensor] = _functions(query).backward(
        *states, sums, Tree(sequences, tiles, positions), scale, window
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
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (states.new_empty(states.shape) for states in (query, key, value))
    return of_query, of_key, of_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sequences, tiles, positions, scale, window = inputs
    ctx.save_for_backward(query, key, value, *output, sequences, tiles, positions)
    ctx.told = (scale, window)


def _gradients(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.hacrl.tree_attention_backward(gradient, *ctx.saved_tensors, *ctx.told)
    return (*found, *[None] * 5)


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
        return import_module("hacrl.agents.tree_kernel")
    except ImportError:
        return None


@cache
@torch.no_grad()
def kernels_are_right(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, window: int
) -> bool:
    """Whether they compute attention, and its gradients, of such heads on this device. Tried, once."""
    if _kernels() is None or width > MOST_WIDTH:
        return False
    # a prompt of 70 tokens with responses of 40, 1 and 65, and a sequence of 5 by itself
    shape = [[0, 70, 110, 111, 176], [70, 40, 1, 65, 5], [0, 0, 0, 0, 0], [0, 70, 70, 70, 0]]
    tree = plant(*(torch.tensor(row) for row in shape))
    there = Tree(*(part.to(device) for part in tree))
    window = window if window < 0 else 30
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(181, count, width, generator=generator).to(dtype)
        for count in (heads, heads, key_heads, key_heads)
    ]
    try:
        with as_current(device):
            found = _with_gradients(_kernels(), [one.to(device) for one in given], there, window)
    except Exception:  # whatever it is, there is another way
        return False
    exact = _with_gradients(tree_plain, given, tree, window)
    return all(_is_close(one.cpu().float(), other.float()) for one, other in zip(found, exact, strict=True))


def _with_gradients(functions: Any, given: list[Tensor], tree: Tree, window: int) -> list[Tensor]:
    gradient, *states = given
    told = (tree, 0.1, window)
    out, sums = functions.forward(*states, *told)
    return [out, *functions.backward(gradient, *states, out, sums, *told)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    """By the mean: in 16 bits, one of many numbers is always far off. NaN is not."""
    return bool((one - other).abs().mean() <= 0.02 * other.abs().mean())
