"""Sequences that share a prompt, or nothing, as trees; attention by the long way round, and gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.models.attention.packed import SequenceBounds, packed_attention
from hacrl.models.attention.prefix_tree import PrefixTree, build_tree

Groups = list[tuple[int, list[int]]]  # tokens of a sequence and of those that grow from it


def planted(groups: Groups) -> tuple[int, PrefixTree]:
    """All tokens, and the tree."""
    rows, place = [], 0
    for trunk, branches in groups:
        rows.append((place, trunk, 0, 0))
        start, place = place, place + trunk
        for branch in branches:
            rows.append((place, branch, start, trunk))
            place += branch
    return place, build_tree(*torch.tensor(rows).unbind(1))


def long_way_round(query, key, value, tree: PrefixTree, scale: float, window: int) -> Tensor:
    """Every sequence with copies of all keys that it sees."""
    lengths, places = [], []
    for own, end, trunk, trunk_end, _ in tree.sequences.view(-1, 5).tolist()[:-1]:  # but for the empty one
        lengths.append((end - own, trunk_end - trunk + end - own))
        places += [*range(trunk, trunk_end), *range(own, end)]
    queries, keys = (pad(torch.tensor(one).cumsum(0), (1, 0)).int() for one in zip(*lengths, strict=True))
    most = [max(one) for one in zip(*lengths, strict=True)]
    segments = SequenceBounds(queries.to(query.device), keys.to(query.device), *most)
    copied = torch.tensor(places, device=query.device)
    return packed_attention(query, key[copied], value[copied], segments, scale, window)


def with_gradients(attend, given, *told) -> list[Tensor]:
    *inputs, weights = given
    out = attend(*inputs, *told)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
