"""Packed sequences that share prefixes, e.g. responses that share a prompt: which token attends to which."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64  # tokens that one program of the kernels computes
# Many tokens attend to a prefix. For the gradients of its keys they are divided among programs, each with at
# least so many tokens, unless the prefix has enough tiles to keep a GPU busy.
MIN_QUERIES_PER_TASK = 1024
ENOUGH_PROGRAMS = 64


class PrefixTree(NamedTuple):
    """A token attends to all of its sequence's prefix and to the tokens before it in its own sequence.

    The sequences that share a prefix stand directly behind it. So one range of tokens attends to a prefix.
    Tables are flat, never empty, and no two have the same length: otherwise torch.compile would specialise.
    """

    sequences: (
        Tensor  # (5 S,): own begin and end, prefix begin and end, end of the last sequence that shares it
    )
    tiles: Tensor  # (2 tiles,): sequence number, first token
    positions: Tensor  # (tokens,): position of each token in its text
    # (5 tasks,): begin and end of the keys in a tile, of the queries, and the partial sum's number (-1: none)
    key_tasks: Tensor
    reductions: Tensor  # (4 reductions,): begin and end of the keys in a tile, and of their partial sums
    partial_sums: int  # number of partial sums of key gradients

    def moved(self, move: Callable[[Tensor], Tensor]) -> PrefixTree:
        """Return the tree with ``move`` applied to every tensor."""
        sequences, tiles, positions, key_tasks, reductions = map(move, self[:5])
        return PrefixTree(sequences, tiles, positions, key_tasks, reductions, self.partial_sums)


def build_tree(starts: Tensor, lengths: Tensor, prefix_starts: Tensor, prefix_lengths: Tensor) -> PrefixTree:
    """Return the tree of S sequences in order of their starts, (S,) each; a prefix of length 0 is none.

    An empty sequence is appended, so that there are always at least two.
    """
    starts, lengths, prefix_starts, prefix_lengths = (
        torch.cat([column, column.new_full((1,), last)])
        for column, last in (
            (starts, int(starts[-1] + lengths[-1])),
            (lengths, 0),
            (prefix_starts, 0),
            (prefix_lengths, 0),
        )
    )
    ends = starts + lengths
    last_ends = ends.clone()
    has_prefix = prefix_lengths > 0
    # of several sequences with this start only the last one is not empty
    prefix = torch.searchsorted(starts, prefix_starts[has_prefix], right=True) - 1
    last_ends.scatter_reduce_(0, prefix, ends[has_prefix], "amax")
    prefix_starts = prefix_starts * has_prefix
    counts = _ceil_div(lengths, torch.full_like(lengths, TILE)).clamp(min=1)
    number = torch.arange(len(starts)).repeat_interleave(counts)
    first = starts[number] + TILE * concatenated_ranges(counts)
    key_tasks, reductions, partial_sums = _key_tasks(first, ends[number], last_ends[number], counts[number])
    return PrefixTree(
        torch.stack([starts, ends, prefix_starts, prefix_starts + prefix_lengths, last_ends], 1)
        .flatten()
        .int(),
        torch.stack([number, first], 1).flatten().int(),
        (prefix_lengths.repeat_interleave(lengths) + concatenated_ranges(lengths)).int(),
        key_tasks,
        reductions,
        partial_sums,
    )


def _key_tasks(first: Tensor, end: Tensor, last_end: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor, int]:
    """Divide the queries that attend to each tile's keys into tasks, the largest tasks first.

    Return the tables of tasks and reductions, and the number of partial sums.
    """
    queries = last_end - first
    wanted = torch.minimum(
        _ceil_div(queries, torch.full_like(queries, MIN_QUERIES_PER_TASK)),
        _ceil_div(torch.full_like(tiles, ENOUGH_PROGRAMS), tiles),
    )
    is_prefix = last_end > end
    parts = torch.where(is_prefix, wanted, 1).clamp(min=1)
    size = _ceil_div(queries, parts)
    tile = torch.arange(len(first)).repeat_interleave(parts)
    begin = (first[tile] + size[tile] * concatenated_ranges(parts)).minimum(last_end[tile])
    until = (begin + size[tile]).minimum(last_end[tile])
    in_parts = parts > 1
    used = torch.where(in_parts, parts, 0)
    start = used.cumsum(0) - used
    partial_sum = torch.where(in_parts[tile], start[tile] + concatenated_ranges(parts), -1)
    order = (until - begin).argsort(descending=True, stable=True)
    tasks = torch.stack([first[tile], end[tile], begin, until, partial_sum], 1)[order]
    reductions = torch.stack([first, end, start, start + used], 1)[in_parts]
    # empty rows, so that there are more tasks than sequences, and at least two reductions
    tasks, reductions = (
        torch.cat([tasks, tasks.new_tensor([[0, 0, 0, 0, -1]])]),
        pad(reductions, (0, 0, 0, 2)),
    )
    return tasks.flatten().int(), reductions.flatten().int(), max(2, int(used.sum()))


def _ceil_div(whole: Tensor, size: Tensor) -> Tensor:
    return (whole + size - 1).div(size, rounding_mode="floor")


def concatenated_ranges(lengths: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return the ranges start, start + 1, ... of these lengths, one after the other; default start: 0."""
    before = pad(lengths.cumsum(0), (1, 0))
    first = -before[:-1] if starts is None else starts - before[:-1]
    return first.repeat_interleave(lengths) + torch.arange(int(before[-1]))
