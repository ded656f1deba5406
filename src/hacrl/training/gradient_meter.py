"""Measure how the gradients of other agents' responses align with the learner's own, within one update.

The update's backward passes run source by source, the learner's own responses first. After each source the
meter looks at what that source has added to the gradient sums. So the measurement needs no pass of its own
for sources that are trained on. It keeps up to three float32 copies of the gradients until the update.
Passes over probes (responses that are not trained on) come last, and :meth:`undo` takes their gradients out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.algorithms.alignment import Alignment
from hacrl.models.rank_group import Ranks
from hacrl.training.optimizer import MasterWeightAdamW

Sums = Sequence[Tensor | None]  # per weight; None: no pass has reached it


class GradientMeter:
    """Compares what each source adds to an optimizer's gradient sums with what the own responses added."""

    def __init__(self, optimizer: MasterWeightAdamW) -> None:
        self._optimizer = optimizer
        self._own: list[Tensor | None] = []
        self._before: list[Tensor | None] = []  # the sums before the source under way
        self._dots: dict[str, Tensor] = {}  # float64 sums over this rank's weights
        self._squares: dict[str, Tensor] = {}
        self._own_square: Tensor | None = None

    @torch.no_grad()
    def end_own(self) -> None:
        """Keep the gradient of own responses; call it after their passes."""
        self._own = self._before = _copies(self._optimizer.summed_gradients())
        self._own_square = _dot(self._own, self._own)

    @torch.no_grad()
    def end_source(self, source: str) -> None:
        """Measure what was added since the last call; call it after the passes of one source."""
        self._before = _copies(self._measure(source))

    @torch.no_grad()
    def undo(self, source: str) -> None:
        """Measure a source's probes like :meth:`end_source`, and take their gradients out of the sums."""
        for now, before in zip(self._measure(source), self._before, strict=True):
            if now is not None:
                now.zero_() if before is None else now.copy_(before)

    def _measure(self, source: str) -> list[Tensor | None]:
        sums = self._optimizer.summed_gradients()
        added = [_difference(now, before) for now, before in zip(sums, self._before, strict=True)]
        self._dots[source] = _dot(self._own, added)
        self._squares[source] = _dot(added, added)
        return sums

    def alignments(self, ranks: Ranks) -> dict[str, Alignment]:
        """Return the measurements over all ranks' shares of the weights, the same on every rank."""
        if self._own_square is None:
            return {}
        own = float(self._own_square)
        numbers = {
            source: [float(self._dots[source]), own, float(self._squares[source])] for source in self._dots
        }
        found = [json.loads(data) for data in ranks.gather(json.dumps(numbers).encode())]
        totals = {source: [sum(rank[source][i] for rank in found) for i in range(3)] for source in numbers}
        return {source: Alignment(dot, a**0.5, b**0.5) for source, (dot, a, b) in totals.items()}


def _copies(sums: Sums) -> list[Tensor | None]:
    return [None if gradient is None else gradient.clone() for gradient in sums]


def _difference(now: Tensor | None, before: Tensor | None) -> Tensor | None:
    return now if now is None or before is None else now - before


def _dot(one: Sums, other: Sums) -> Tensor:
    parts = [
        torch.sum(a * b, dtype=torch.float64)
        for a, b in zip(one, other, strict=True)
        if a is not None and b is not None
    ]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64)
