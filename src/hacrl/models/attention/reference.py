"""Attention in a tree and its gradients, computed plainly in float32: what kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hacrl.models.attention.tree import Tree


def forward(
    query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """See :func:`hacrl.models.attention.kernels.forward`; sums are natural logarithms here."""
    out = torch.empty(query.shape, dtype=query.dtype)
    sums = torch.empty(query.shape[1], query.shape[0])
    for own, seen, mask in _sequences(tree, window):
        keys, values = (_for_queries(states[seen], query) for states in (key, value))
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
    tree: Tree,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """With weights p = exp(s - sum): ds = p (dp - mean), where the mean is that of dp, weighted by p."""
    of_query, of_key, of_value = (torch.zeros(states.shape) for states in (query, key, value))
    for own, seen, mask in _sequences(tree, window):
        queries, given = query[own].float(), gradient[own].float()
        keys, values = (_for_queries(states[seen], query) for states in (key, value))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale + mask
        weights = (scores - sums[:, own].unsqueeze(-1)).exp()
        mean = (given * out[own].float()).sum(-1).t().unsqueeze(-1)
        inner = weights * (torch.einsum("qhd,khd->hqk", given, values) - mean) * scale
        of_query[own] = torch.einsum("hqk,khd->qhd", inner, keys)
        _add(of_key, seen, torch.einsum("hqk,qhd->khd", inner, queries))
        _add(of_value, seen, torch.einsum("hqk,qhd->khd", weights, given))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _sequences(tree: Tree, window: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each one's tokens, whom they may see, and what is added to these scores: nothing, or minus infinity."""
    positions = tree.positions
    for own, end, trunk, trunk_end, _ in tree.sequences.view(-1, 5).tolist():
        rows = torch.arange(own, end)
        seen = torch.cat([torch.arange(trunk, trunk_end), rows])
        before = positions[rows].unsqueeze(1) - positions[seen]
        hidden = before < 0
        if window >= 0:
            hidden |= before > window
        yield slice(own, end), seen, torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _for_queries(states: Tensor, query: Tensor) -> Tensor:
    """Every head as often as there are query heads to it."""
    return states.float().repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _add(total: Tensor, places: Tensor, states: Tensor) -> None:
    """Of query heads, to the heads that they share."""
    (tokens, heads, width), shared = states.shape, total.shape[1]
    total.index_add_(0, places, states.view(tokens, shared, heads // shared, width).sum(2))
