"""Rollouts that a learner did not wait for: they teach it in a later step, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

IsUsable = Callable[[int, str], bool | None]


class LateRollouts:
    """Remembers which batches of which agents each learner has gone on without."""

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._left_out: dict[str, dict[int, list[str]]] = {}  # learner -> batch -> sources

    def leave_out(self, learner: str, batch: int, sources: Sequence[str]) -> None:
        """Record that a learner learns from a batch without these agents' rollouts."""
        if sources:
            self._left_out.setdefault(learner, {})[batch] = sorted(sources)

    def take(
        self, learner: str, step: int, is_usable: IsUsable
    ) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        """Return what teaches the learner in this step, and what never will: sources by batch.

        ``is_usable(batch, source)`` says whether rollouts that are there are fresh enough; None: they are not
        there yet. Those of batch a come from a policy after step a - 1 at best. So in step b they are b - a
        steps old at least, and if that is too much, nobody waits for them any longer.
        """
        teaching: dict[int, list[str]] = {}
        dropped: dict[int, list[str]] = {}
        waiting: dict[int, list[str]] = {}
        for batch, sources in sorted(self._left_out.get(learner, {}).items()):
            for source in sources:
                usable = is_usable(batch, source)
                if usable is None and step - batch <= self._max_staleness:
                    into = waiting
                else:
                    into = teaching if usable else dropped
                into.setdefault(batch, []).append(source)
        self._left_out[learner] = waiting
        return teaching, dropped

    def forget(self, learner: str) -> None:
        """Forget what a learner has gone on without."""
        self._left_out.pop(learner, None)

    def oldest_batch(self) -> int | None:
        """Return the oldest batch that some learner may still need; None: there is none."""
        return min((batch for batches in self._left_out.values() for batch in batches), default=None)

    def as_json(self) -> dict[str, Any]:
        """Return plain values; JSON has texts as keys."""
        return {
            learner: {str(batch): sources for batch, sources in batches.items()}
            for learner, batches in self._left_out.items()
        }

    def load_json(self, data: Mapping[str, Any]) -> None:
        """Restore what :meth:`as_json` returned."""
        self._left_out = {
            learner: {int(batch): list(sources) for batch, sources in batches.items()}
            for learner, batches in data.items()
        }
