"""Prefix sharing without copies: causal attention over packed sequences that share prefixes.

Responses read their prompt's keys and values where they are stored. The gradients of shared keys and values
are summed where they are computed. A GPU uses Triton kernels, after a trial that they are correct. A CPU uses
the plain reference; only tests run it there.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hacrl.models.attention import reference
from hacrl.models.attention.prefix_tree import PrefixTree, build_tree
from hacrl.models.device import current_device, is_out_of_memory

MAX_HEAD_WIDTH = 128  # wider heads do not fit a GPU's registers


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float, window: int
) -> Tensor:
    """Return the attention outputs, (tokens, heads, D).

    Keys and values may have fewer heads than queries (grouped-query attention). With a window of 0 or more, a
    token attends to itself and so many tokens before it.
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
    key_tasks: Tensor,
    reductions: Tensor,
    partial_sums: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    states = [_contiguous_heads(each) for each in (query, key, value)]
    tree = PrefixTree(sequences, tiles, positions, key_tasks, reductions, partial_sums)
    result: tuple[Tensor, Tensor] = _functions(query).forward(*states, tree, scale, window)
    return result


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Tensor,
    tiles: Tensor,
    positions: Tensor,
    key_tasks: Tensor,
    reductions: Tensor,
    partial_sums: int,
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
    key_tasks: Tensor,
    reductions: Tensor,
    partial_sums: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    states = [_contiguous_heads(each) for each in (gradient, query, key, value, out)]
    tree = PrefixTree(sequences, tiles, positions, key_tasks, reductions, partial_sums)
    result: tuple[Tensor, Tensor, Tensor] = _functions(query).backward(*states, sums, tree, scale, window)
    return result


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
    key_tasks: Tensor,
    reductions: Tensor,
    partial_sums: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    query_gradient, key_gradient, value_gradient = (
        each.new_empty(each.shape) for each in (query, key, value)
    )
    return query_gradient, key_gradient, value_gradient


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, partial_sums, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
    ctx.numbers = (partial_sums, scale, window)


def _gradients(ctx: Any, gradient: Tensor, sums_gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.hacrl.tree_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return (*gradients, *[None] * 8)


_attend.register_autograd(_gradients, setup_context=_save_for_backward)


def _contiguous_heads(states: Tensor) -> Tensor:
    """Return the states with each head's numbers next to each other in memory, as the kernels read them."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _functions(states: Tensor) -> Any:
    return reference if states.device.type == "cpu" else _kernels()


@cache
def _kernels() -> Any:
    """Return the module of Triton kernels, or None without Triton (part of torch for GPUs on Linux)."""
    try:
        return import_module("hacrl.models.attention.kernels")
    except ImportError:
        return None


@cache
@torch.no_grad()
def kernels_are_correct(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int, window: int
) -> bool:
    """Return whether the kernels compute attention and its gradients correctly, found out by a trial."""
    if _kernels() is None or width > MAX_HEAD_WIDTH or heads % key_heads:
        return False
    # a prompt of 70 tokens with responses of 500, 1, 65 and 560, and a sequence of 5 without a prefix
    lengths = torch.tensor([70, 500, 1, 65, 560, 5])
    prefix_lengths = torch.tensor([0, 70, 70, 70, 70, 0])
    tree = build_tree(lengths.cumsum(0) - lengths, lengths, torch.zeros_like(lengths), prefix_lengths)
    options = 0.1, window if window < 0 else 30
    generator = torch.Generator().manual_seed(0)
    group = heads // key_heads
    inputs = [
        torch.randn(int(lengths.sum()), count, width, generator=generator).to(dtype)
        for count in (2 * group, 2 * group, 2, 2)
    ]
    try:
        with current_device(device):
            device_tree = tree.moved(lambda table: table.to(device))
            results = _with_gradients(_kernels(), [each.to(device) for each in inputs], device_tree, *options)
    except Exception as error:
        if is_out_of_memory(error):
            raise  # this is no property of the kernels
        return False  # whatever the error is, attention works without these kernels
    expected = _with_gradients(reference, inputs, tree, *options)
    return all(
        _is_close(result.cpu().float(), exact.float())
        for result, exact in zip(results, expected, strict=True)
    )


def _with_gradients(
    functions: Any, inputs: list[Tensor], tree: PrefixTree, scale: float, window: int
) -> list[Tensor]:
    gradient, *states = inputs
    out, sums = functions.forward(*states, tree, scale, window)
    return [out, *functions.backward(gradient, *states, out, sums, tree, scale, window)]


def _is_close(result: Tensor, exact: Tensor) -> bool:
    """Compare on average over all numbers, each token and each head: some numbers in 16 bits are far off."""
    error, usual = (result - exact).abs(), exact.abs().mean()
    whole, tokens, heads = error.mean(), error.mean((1, 2)).max(), error.mean((0, 2)).max()
    return bool(whole <= 0.02 * usual and tokens <= 0.2 * usual and heads <= 0.05 * usual)
