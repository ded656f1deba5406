"""Attention over keys that are shared, by responses to one prompt and by query heads; gradients in one piece.

What autograd would make of handing out keys and attending to them keeps all copies for the backward pass, and
adds up gradients twice: over the query heads of a key head, then over the copies of a token. Here keys are
handed out again in the backward pass, each head as often as it has query heads, and added up once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hacrl.agents import attention_kernels
from hacrl.agents.attention_kernels import Segments
from hacrl.agents.shared_keys import Shared, added_up, repeated


def shared_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    shared: Shared | None,
    scale: float,
    window: int,
) -> Tensor:
    """Causal attention within each sequence; (tokens, heads, D).

    The segments' keys are those that were handed out, if any are shared; a way back must be known then.
    """
    way = (None, None, None) if shared is None else shared
    out: Tensor = torch.ops.hacrl.shared_attention(query, key, value, *segments, *way, scale, window)[0]
    return out


@torch.library.custom_op("hacrl::shared_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    places: Tensor | None,
    order: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    segments = Segments(queries, keys, most_queries, most_keys)
    key, value = repeated(key, places, 1), repeated(value, places, 1)
    out, sums = attention_kernels.forward(query, key, value, segments, scale, window)
    return out.contiguous(), sums.contiguous()  # as is promised below


@_attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Tensor,
    keys: Tensor,
    most_queries: int,
    most_keys: int,
    places: Tensor | None,
    order: Tensor | None,
    starts: Tensor | None,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("hacrl::shared_attention_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    queries: Tensor,
    keys: Tensor,
    places: Tensor | None,
    order: Tensor | None,
    starts: Tensor | None,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    segments = Segments(queries, keys, most_queries, most_keys)
    key, value = repeated(key, places, group), repeated(value, places, group)
    of_query, of_keys, of_values = attention_kernels.backward(
        gradient, query, key, value, out, sums, segments, scale, window
    )
    del key, value  # the copies' memory is free for the sums
    totals = [added_up(copies, order, starts, group).contiguous() for copies in (of_keys, of_values)]
    return of_query.contiguous(), totals[0], totals[1]


@_attend_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    queries: Tensor,
    keys: Tensor,
    places: Tensor | None,
    order: Tensor | None,
    starts: Tensor | None,
    most_queries: int,
    most_keys: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_keys, of_values = (states.new_empty(states.shape) for states in (query, key, value))
    return of_query, of_keys, of_values


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keys and values as they came: their copies are made again."""
    query, key, value, queries, keys, *sizes, places, order, starts, scale, window = inputs
    ctx.save_for_backward(query, key, value, *output, queries, keys, places, order, starts)
    ctx.told = (*sizes, scale, window)


def _gradients(ctx: Any, gradient: Tensor, of_sums: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.hacrl.shared_attention_backward(gradient, *ctx.saved_tensors, *ctx.told)
    return (*found, *[None] * 9)


_attend.register_autograd(_gradients, setup_context=_keep)
