"""Whether other agents' responses push a learner the same way as its own do (theorem 4.3), in every step.

The cosine of the angle between two gradients of the step's first update: of the learner's own responses, and
of all others'. The passes over own responses run first. Their gradient is then in the optimizer's sums, and
what the sums grow by afterwards is the others'. A copy of a whole gradient would be as large as the model, so
the two are compared in evenly spaced numbers, at most ``COMPARED`` of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hacrl.models.rank_group import Ranks
from hacrl.training.optimizer import MasterWeightAdamW
from hacrl.types import LearnerSample

COMPARED = 2**20  # numbers of a gradient; smaller gradients are compared as a whole


def own_and_others(samples: Sequence[LearnerSample]) -> list[Sequence[LearnerSample]]:
    """Return the learner's own samples, and all others."""
    return [[s for s in samples if s.is_own], [s for s in samples if not s.is_own]]


class GradientAlignment:
    """Compares two parts of the gradient that one update's passes add up."""

    def __init__(self, optimizer: MasterWeightAdamW, ranks: Ranks) -> None:
        self._optimizer = optimizer
        self._ranks = ranks
        self._sums: list[Tensor] = []  # after each part

    def part_done(self) -> None:
        """Remember the gradient sums up to here."""
        self._sums.append(self._optimizer.sampled_gradients(COMPARED))

    def cosine(self) -> float | None:
        """Return the cosine between the gradients of two parts; None if one is 0 or there are no parts."""
        if not self._sums:
            return None
        own, total = self._sums
        return cosine_of_ranks(own, total - own, self._ranks)


@torch.no_grad()
def cosine_of_ranks(one: Tensor, other: Tensor, ranks: Ranks) -> float | None:
    """Return the cosine between two vectors of which every rank has a part; None if one of them is 0."""
    products = torch.stack([one @ other, one @ one, other @ other]).tolist()
    gathered = [json.loads(data) for data in ranks.gather(json.dumps(products).encode())]
    dot, square, other_square = (math.fsum(column) for column in zip(*gathered, strict=True))
    length = math.sqrt(square) * math.sqrt(other_square)
    return dot / length if length > 0 and math.isfinite(length) else None
