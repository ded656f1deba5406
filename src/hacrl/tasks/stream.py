"""The order in which training asks the problems: a function of the seed and the step alone."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import islice

from hacrl.errors import TaskError
from hacrl.seeding import derive_seed
from hacrl.types import Problem


class ProblemStream:
    """Shuffled epochs over the problems. A batch never spans two epochs, so it holds no problem twice."""

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int) -> None:
        if batch_size > len(problems):
            raise TaskError(
                f"rollout.prompts_per_step={batch_size}, but the task has only {len(problems)} training "
                "problems; lower it, or give more data"
            )
        self._problems = problems
        self._batch_size = batch_size
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def batch(self, step: int) -> list[Problem]:
        """Return the problems of one step, counted from 0."""
        epoch, index = divmod(step, len(self._problems) // self._batch_size)
        start = index * self._batch_size
        return [self._problems[i] for i in self._order(epoch)[start : start + self._batch_size]]

    @property
    def problems(self) -> Sequence[Problem]:
        """All problems."""
        return self._problems

    def replacements(self, step: int, number: int, count: int, known: Collection[str]) -> list[Problem]:
        """Return up to ``count`` other problems for a further round of a step, counted from 0.

        They are drawn at random from all problems but the ``known`` ones (ids): steps and their epochs stay
        as they are. Fewer are returned if there are no more.
        """
        order = list(range(len(self._problems)))
        random.Random(derive_seed(self._seed, "resample", step, number)).shuffle(order)
        others = (self._problems[i] for i in order if self._problems[i].id not in known)
        return list(islice(others, count))

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(derive_seed(self._seed, "problems", epoch)).shuffle(order)
        return order
