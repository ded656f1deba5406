"""Divide mini-batches among the ranks of an agent, so that every rank computes about as many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hacrl.training.batching import sample_length
from hacrl.types import LearnerSample


class RankShares:
    """Which rank computes which sample of one step.

    A sample that comes again goes to the same rank: that rank remembers the sample's old policy. Every rank
    divides alike, because it depends on the samples and on nothing else.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._rank_of: dict[int, int] = {}  # by id(sample): two rollouts may have equal tokens

    def divide(self, samples: Sequence[LearnerSample], packed: bool) -> list[list[LearnerSample]]:
        """Return the samples of each rank.

        The longest unit of work goes first, each to the rank with the fewest tokens so far. A unit is a
        sample, or a packed prompt with its responses, whose tokens are computed once for all of them. A unit
        larger than a rank's fair share is split.
        """
        shares: list[list[LearnerSample]] = [[] for _ in range(self._world)]
        loads = [0] * self._world
        new = []
        for sample in samples:
            rank = self._rank_of.get(id(sample))
            if rank is None:
                new.append(sample)
            else:
                shares[rank].append(sample)
                loads[rank] += sample_length(sample)
        for unit in sorted(self._units(new, packed), key=lambda unit: -_tokens(unit, packed)):
            rank = loads.index(min(loads))
            shares[rank] += unit
            loads[rank] += _tokens(unit, packed)
            self._rank_of.update((id(sample), rank) for sample in unit)
        return shares

    def _units(self, samples: Sequence[LearnerSample], packed: bool) -> Iterator[list[LearnerSample]]:
        if not packed:
            yield from ([sample] for sample in samples)
            return
        groups: dict[tuple[int, ...], list[LearnerSample]] = {}
        for sample in samples:
            groups.setdefault(sample.prompt_ids, []).append(sample)
        fair = sum(_tokens(group, packed) for group in groups.values()) / self._world
        for group in groups.values():
            part: list[LearnerSample] = []
            for sample in group:
                if part and _tokens([*part, sample], packed) > fair:
                    yield part
                    part = []
                part.append(sample)
            yield part


def _tokens(unit: Sequence[LearnerSample], packed: bool) -> int:
    """Return the tokens that a forward pass computes for a unit."""
    if not packed:
        return sum(map(sample_length, unit))
    return len(unit[0].prompt_ids) + sum(len(sample.response_ids) for sample in unit)
