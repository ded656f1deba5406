"""Who sees whom among sequences laid end to end; several may grow from one, as responses from a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64  # tokens that a program of our kernels has
# A trunk is looked at by many: for gradients of its keys they are divided among programs, each with so many
# tokens at least, unless the trunk has tiles enough to keep a GPU busy.
LEAST_LOOKING = 1024
ENOUGH_PROGRAMS = 64


class Tree(NamedTuple):
    """A token sees those before it in its own sequence and, first, all of its sequence's trunk.

    What grows from a trunk stands right behind it, so that a trunk's tokens are seen by one range of tokens.
    Tables are flat, and never empty or of equal length: compilers make a case of its own of all that.
    """

    sequences: Tensor  # (5 S,): where one begins and ends, its trunk does, and what grows from it ends
    tiles: Tensor  # (2 tiles,): each one's sequence and first token
    positions: Tensor  # (tokens,) in the text that a token is part of
    looks: Tensor  # (5 looks,): begin and end of keys in a tile, of who looks at them, and the place of a sum
    totals: Tensor  # (4 totals,): begin and end of keys in a tile, and of the places of sums that make theirs
    places: int  # for sums of those who look at the same keys

    def moved(self, move: Callable[[Tensor], Tensor]) -> Tree:
        """The same elsewhere."""
        sequences, tiles, positions, looks, totals = map(move, self[:5])
        return Tree(sequences, tiles, positions, looks, totals, self.places)


def plant(own: Tensor, lengths: Tensor, trunks: Tensor, trunk_lengths: Tensor) -> Tree:
    """Of sequences that begin there, in order, and of the trunks that they grow from, if those have length.

    One without tokens comes last, so that there are always two.
    """
    own, lengths, trunks, trunk_lengths = (
        torch.cat([one, one.new_full((1,), last)])
        for one, last in ((own, int(own[-1] + lengths[-1])), (lengths, 0), (trunks, 0), (trunk_lengths, 0))
    )
    ends = own + lengths
    reach = ends.clone()
    grows = trunk_lengths > 0
    # of those that begin there the last: others are empty
    whose = torch.searchsorted(own, trunks[grows], right=True) - 1
    reach.scatter_reduce_(0, whose, ends[grows], "amax")
    trunks = trunks * grows
    counts = _parts(lengths, torch.full_like(lengths, TILE)).clamp(min=1)
    number = torch.arange(len(own)).repeat_interleave(counts)
    first = own[number] + TILE * ranges(counts)
    looks, totals, places = _looks(first, ends[number], reach[number], counts[number])
    return Tree(
        torch.stack([own, ends, trunks, trunks + trunk_lengths, reach], 1).flatten().int(),
        torch.stack([number, first], 1).flatten().int(),
        (trunk_lengths.repeat_interleave(lengths) + ranges(lengths)).int(),
        looks,
        totals,
        places,
    )


def _looks(first: Tensor, end: Tensor, reach: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor, int]:
    """Who looks at the keys of each tile, in several parts if they are many; those with most to do first."""
    looking = reach - first
    wanted = torch.minimum(
        _parts(looking, torch.full_like(looking, LEAST_LOOKING)),
        _parts(torch.full_like(tiles, ENOUGH_PROGRAMS), tiles),
    )
    is_trunk = reach > end
    parts = torch.where(is_trunk, wanted, 1).clamp(min=1)
    size = _parts(looking, parts)
    tile = torch.arange(len(first)).repeat_interleave(parts)
    begin = (first[tile] + size[tile] * ranges(parts)).minimum(reach[tile])
    until = (begin + size[tile]).minimum(reach[tile])
    in_parts = parts > 1
    used = torch.where(in_parts, parts, 0)
    start = used.cumsum(0) - used
    place = torch.where(in_parts[tile], start[tile] + ranges(parts), -1)
    order = (until - begin).argsort(descending=True, stable=True)
    looks = torch.stack([first[tile], end[tile], begin, until, place], 1)[order]
    totals = torch.stack([first, end, start, start + used], 1)[in_parts]
    # at nothing, so that there are more looks than sequences, and two totals at least
    looks, totals = torch.cat([looks, looks.new_tensor([[0, 0, 0, 0, -1]])]), pad(totals, (0, 0, 0, 2))
    return looks.flatten().int(), totals.flatten().int(), max(2, int(used.sum()))


def _parts(whole: Tensor, size: Tensor) -> Tensor:
    """How many of that size it takes."""
    return (whole + size - 1).div(size, rounding_mode="floor")


def ranges(lengths: Tensor, starts: Tensor | None = None) -> Tensor:
    """So many numbers from each start on, or from 0, one range behind the other."""
    before = pad(lengths.cumsum(0), (1, 0))
    first = -before[:-1] if starts is None else starts - before[:-1]
    return first.repeat_interleave(lengths) + torch.arange(int(before[-1]))
