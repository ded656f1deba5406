"""Causal attention of sequences laid end to end, and its gradients, as functions that remember nothing.

torch's own attention decides what is kept for the backward pass and who adds up gradients. Here that is up to
the caller. With a ``window`` that is not negative, a token sees only so many before itself. On a CPU, where
only tests come here, everything is computed plainly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Where queries and keys of each sequence begin, one more than there are, and how many the longest has.

    A sequence with fewer queries than keys has the last ones: those before were computed elsewhere.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


def forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """What is seen, (tokens, heads, D), and the log-sum-exp of all scores, (heads, tokens) in float32.

    There may be fewer heads of keys and values than of queries: each is for several, side by side.
    """
    if query.device.type == "cpu":
        return _plain_forward(query, key, value, segments, scale, window)
    out, sums, _, _, _ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *segments,
        0.0,  # dropout
        window < 0,
        False,  # no masks to look at
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )
    return out, sums


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    segments: Segments,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; as many heads of each, so that there is nothing to add up."""
    if query.device.type == "cpu":
        return _plain_backward(gradient, query, key, value, out, sums, segments, scale, window)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)  # what torch hands on, too
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient,
        query,
        key,
        value,
        out,
        sums,
        *segments,
        0.0,  # dropout
        window < 0,
        no_dropout,
        no_dropout.new_empty(0),
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )
    return found


def _plain_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """In float32, one sequence after the other."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    sums = torch.empty(query.shape[1], query.shape[0])
    for own, seen, mask in _sequences(segments, window):
        keys, values = (states[seen].float().repeat_interleave(group, dim=1) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[own].float(), keys) * scale + mask
        sums[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out, sums


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    segments: Segments,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights p = exp(s - log-sum-exp): ds = p (dp - sum of do * o)."""
    found = tuple(torch.zeros(states.shape, dtype=states.dtype) for states in (query, key, value))
    for own, seen, mask in _sequences(segments, window):
        queries, keys, values = query[own].float(), key[seen].float(), value[seen].float()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale + mask
        weights = (scores - sums[:, own].unsqueeze(-1)).exp()
        given = gradient[own].float()
        mean = (given * out[own].float()).sum(-1).t().unsqueeze(-1)
        inner = weights * (torch.einsum("qhd,khd->hqk", given, values) - mean) * scale
        found[0][own] = torch.einsum("hqk,khd->qhd", inner, keys).to(query.dtype)
        found[1][seen] = torch.einsum("hqk,qhd->khd", inner, queries).to(key.dtype)
        found[2][seen] = torch.einsum("hqk,qhd->khd", weights, given).to(value.dtype)
    return found[0], found[1], found[2]


def _sequences(segments: Segments, window: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each one's queries and keys, and what is added to their scores: nothing, or minus infinity."""
    starts, key_starts = segments.queries.tolist(), segments.keys.tolist()
    for row in range(len(starts) - 1):
        own, seen = slice(*starts[row : row + 2]), slice(*key_starts[row : row + 2])
        keys = torch.arange(seen.stop - seen.start)
        at = keys[len(keys) - (own.stop - own.start) :].unsqueeze(1)
        hidden = keys > at
        if window >= 0:
            hidden |= keys < at - window
        yield own, seen, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
