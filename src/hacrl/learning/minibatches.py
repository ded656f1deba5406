"""How a step's samples are cut into mini-batches (one update each) and micro-batches (one forward each)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hacrl.learning.settings import MinibatchOrder
from hacrl.types import LearnerSample


def ordered(
    samples: Sequence[LearnerSample], order: MinibatchOrder, rng: random.Random
) -> list[LearnerSample]:
    """Shuffled: own and others' together, or own first."""
    shuffled = list(samples)
    rng.shuffle(shuffled)
    if order == "self_first":
        shuffled.sort(key=lambda sample: not sample.is_own)  # stable: each part stays shuffled
    return shuffled


def minibatches(
    samples: Sequence[LearnerSample], updates: int, epochs: int, order: MinibatchOrder, seed: int
) -> list[list[LearnerSample]]:
    """``updates`` mini-batches over ``epochs`` passes, of equal size but for one sample.

    With fewer samples than updates some mini-batches are empty and make no update.
    """
    rng = random.Random(seed)
    passes = [ordered(samples, order, rng) for _ in range(epochs)]
    stream = [sample for one_pass in passes for sample in one_pass]
    edges = [len(stream) * i // updates for i in range(updates + 1)]
    cut = [stream[start:end] for start, end in pairwise(edges)]
    return [minibatch for minibatch in cut if minibatch]


def micro_batches(
    samples: Sequence[LearnerSample], token_budget: int, packed: bool = False
) -> Iterator[list[LearnerSample]]:
    """Groups of similar length that fit the budget, padding included unless they are packed; longest first.

    Longest first, so that running out of memory shows in the first forward pass, not in the last.
    A sample longer than the budget goes alone.
    """
    batch: list[LearnerSample] = []
    for sample in sorted(samples, key=sample_length, reverse=True):
        if batch and batch_tokens([*batch, sample], packed) > token_budget:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def batch_tokens(samples: Sequence[LearnerSample], packed: bool) -> int:
    """Tokens that a forward pass over these samples computes."""
    lengths = [sample_length(sample) for sample in samples]
    return sum(lengths) if packed else len(lengths) * max(lengths)


def sample_length(sample: LearnerSample) -> int:
    """Tokens of prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)
