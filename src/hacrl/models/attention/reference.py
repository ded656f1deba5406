"""Prefix-tree attention and its gradients in plain float32: the reference that kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hacrl.models.attention.prefix_tree import PrefixTree


def forward(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Return attention outputs, (tokens, heads, D), and the log-sum-exp of all scores, (heads, tokens).

    The log-sum-exp is a natural logarithm here; the kernels' is binary.
    """
    out = torch.empty(query.shape, dtype=query.dtype)
    sums = torch.empty(query.shape[1], query.shape[0])
    for own, visible, mask in _sequences(tree, window):
        keys, values = (_repeat_heads(states[visible], query) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[own].float(), keys) * scale + mask
        sums[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out, sums


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    tree: PrefixTree,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    With weights p = exp(s - sum): ds = p (dp - mean), where mean is the average of dp, weighted by p.
    """
    query_gradient, key_gradient, value_gradient = (
        torch.zeros(states.shape) for states in (query, key, value)
    )
    for own, visible, mask in _sequences(tree, window):
        queries, out_gradients = query[own].float(), gradient[own].float()
        keys, values = (_repeat_heads(states[visible], query) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale + mask
        weights = (scores - sums[:, own].unsqueeze(-1)).exp()
        mean = (out_gradients * out[own].float()).sum(-1).t().unsqueeze(-1)
        score_gradients = weights * (torch.einsum("qhd,khd->hqk", out_gradients, values) - mean) * scale
        query_gradient[own] = torch.einsum("hqk,khd->qhd", score_gradients, keys)
        _add_to_key_heads(key_gradient, visible, torch.einsum("hqk,qhd->khd", score_gradients, queries))
        _add_to_key_heads(value_gradient, visible, torch.einsum("hqk,qhd->khd", weights, out_gradients))
    return query_gradient.to(query.dtype), key_gradient.to(key.dtype), value_gradient.to(value.dtype)


def _sequences(tree: PrefixTree, window: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each sequence's tokens, the tokens it attends to, and the mask that is added to the scores."""
    positions = tree.positions
    for own, end, prefix, prefix_end, _ in tree.sequences.view(-1, 5).tolist():
        rows = torch.arange(own, end)
        visible = torch.cat([torch.arange(prefix, prefix_end), rows])
        distance = positions[rows].unsqueeze(1) - positions[visible]
        hidden = distance < 0
        if window >= 0:
            hidden |= distance > window
        yield slice(own, end), visible, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _repeat_heads(states: Tensor, query: Tensor) -> Tensor:
    """Repeat every key head for each of its query heads."""
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _add_to_key_heads(total: Tensor, tokens: Tensor, states: Tensor) -> None:
    """Add the states of query heads to the key heads that they share, at these tokens."""
    (count, heads, width), key_heads = states.shape, total.shape[1]
    total.index_add_(0, tokens, states.view(count, key_heads, heads // key_heads, width).sum(2))
