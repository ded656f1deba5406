"""Prefix trees for tests, and attention with copied keys to compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hacrl.models.attention.packed import SequenceBounds, packed_attention
from hacrl.models.attention.prefix_tree import PrefixTree, build_tree

Groups = list[tuple[int, list[int]]]  # tokens of a prefix, and of the sequences that share it


def tree_of(groups: Groups) -> tuple[int, PrefixTree]:
    """Return the number of tokens and the tree."""
    rows, place = [], 0
    for prefix, branches in groups:
        rows.append((place, prefix, 0, 0))
        start, place = place, place + prefix
        for branch in branches:
            rows.append((place, branch, start, prefix))
            place += branch
    return place, build_tree(*torch.tensor(rows).unbind(1))


def attention_with_copies(query, key, value, tree: PrefixTree, scale: float, window: int) -> Tensor:
    """Compute attention with a copy of all keys for every sequence."""
    lengths, places = [], []
    for own, end, prefix, prefix_end, _ in tree.sequences.view(-1, 5).tolist()[:-1]:  # without the empty one
        lengths.append((end - own, prefix_end - prefix + end - own))
        places += [*range(prefix, prefix_end), *range(own, end)]
    queries, keys = (pad(torch.tensor(one).cumsum(0), (1, 0)).int() for one in zip(*lengths, strict=True))
    most = [max(one) for one in zip(*lengths, strict=True)]
    segments = SequenceBounds(queries.to(query.device), keys.to(query.device), *most)
    copied = torch.tensor(places, device=query.device)
    return packed_attention(query, key[copied], value[copied], segments, scale, window)


def with_gradients(attend, given, *told) -> list[Tensor]:
    *inputs, weights = given
    out = attend(*inputs, *told)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]
