"""Who sees whom among sequences laid end to end; several may grow from one, as responses from a prompt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64  # tokens that a program of our kernels has


class Tree(NamedTuple):
    """A token sees those before it in its own sequence and, first, all of its sequence's trunk.

    What grows from a trunk stands right behind it, so that a trunk's tokens are seen by one range of tokens.
    Tables are flat: of 5 sequences in rows of 5, a compiler would make a case of their own.
    """

    sequences: Tensor  # (5 S,): where one begins and ends, its trunk does, and what grows from it ends
    tiles: Tensor  # (2 tiles,): each one's sequence and first token; those that most tokens see come first
    positions: Tensor  # (tokens,) in the text that a token is part of


def plant(own: Tensor, lengths: Tensor, trunks: Tensor, trunk_lengths: Tensor) -> Tree:
    """Of sequences that begin there, in order, and of the trunks that they grow from, if those have length.

    One without tokens comes last, so that there are always two: compilers take one for a case of its own.
    """
    own, lengths, trunks, trunk_lengths = (
        torch.cat([one, one.new_full((1,), last)])
        for one, last in ((own, int(own[-1] + lengths[-1])), (lengths, 0), (trunks, 0), (trunk_lengths, 0))
    )
    ends = own + lengths
    reach = ends.clone()
    grows = trunk_lengths > 0
    reach.scatter_reduce_(0, torch.searchsorted(own, trunks[grows]), ends[grows], "amax")
    trunks = trunks * grows
    counts = (lengths + TILE - 1).div(TILE, rounding_mode="floor").clamp(min=1)
    number = torch.arange(len(own)).repeat_interleave(counts)
    first = own[number] + TILE * ranges(counts)
    order = (reach[number] - first).argsort(descending=True, stable=True)
    return Tree(
        torch.stack([own, ends, trunks, trunks + trunk_lengths, reach], 1).flatten().int(),
        torch.stack([number, first], 1)[order].flatten().int(),
        (trunk_lengths.repeat_interleave(lengths) + ranges(lengths)).int(),
    )


def ranges(lengths: Tensor, starts: Tensor | None = None) -> Tensor:
    """So many numbers from each start on, or from 0, one range behind the other."""
    before = pad(lengths.cumsum(0), (1, 0))
    first = -before[:-1] if starts is None else starts - before[:-1]
    return first.repeat_interleave(lengths) + torch.arange(int(before[-1]))
