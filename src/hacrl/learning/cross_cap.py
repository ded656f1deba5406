"""Which responses of others a learner learns from, if it may not learn from all.

With n agents every learner has n * G responses per prompt, so that learning costs n^2 in all. A cap on
others' responses keeps it linear in n. What is left out is left out of the loss alone: baselines and
capabilities take every reward, which costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from hacrl.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Candidate:
    """One response of another agent to one prompt."""

    source: str
    place: int  # among the source's responses to the prompt
    reward: float
    advantage: float  # as the learner sees it


def ranked(candidates: Iterable[Candidate], seed: int, prompt: str) -> list[Candidate]:
    """The candidates of one prompt, most useful first, whatever order they come in.

    Those that carry signal before those with advantage 0; among these, the highest reward first: correct
    answers teach more than others' mistakes, which the learner need not make. Among equals the source that
    has been chosen least is next, so that no source crowds out the rest; draws are keyed by seed and prompt.
    """
    rng = random.Random(derive_seed(seed, prompt))
    shuffled = sorted(candidates, key=lambda one: (one.source, one.place))
    rng.shuffle(shuffled)
    sources = sorted({one.source for one in shuffled})
    rng.shuffle(sources)
    waiting: dict[tuple[bool, float], dict[str, list[Candidate]]] = {}
    for one in shuffled:
        tier = waiting.setdefault((one.advantage == 0, -one.reward), {})
        tier.setdefault(one.source, []).append(one)
    chosen = dict.fromkeys(sources, 0)
    order: list[Candidate] = []
    for _, by_source in sorted(waiting.items()):
        while by_source:
            source = min(chosen, key=lambda name: (name not in by_source, chosen[name]))  # first of equals
            order.append(by_source[source].pop())
            chosen[source] += 1
            if not by_source[source]:
                del by_source[source]
    return order
