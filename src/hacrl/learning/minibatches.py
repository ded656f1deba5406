"""How a step's samples are cut into mini-batches (one update each) and micro-batches (one forward each)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

from hacrl.agents.packing import TokenPair, packed_tokens, padded_tokens
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
    samples: Sequence[LearnerSample], token_budget: int, packed: bool = False, most_seen: int | None = None
) -> list[list[LearnerSample]]:
    """Groups that fit the budget, longest first: padded ones of similar length, packed ones by prompt.

    Longest first, so that running out of memory shows in the first forward pass, not in the last.
    A sample longer than the budget goes alone. Packed ones are as few as the budget allows and about equal:
    a GPU has done a small one before Python has launched the next. ``most_seen``: their tokens, with a prompt
    for each of them.
    """
    if not packed:
        return list(_cut(sorted(samples, key=sample_length, reverse=True), token_budget, packed))
    in_order = _by_prompt(samples)
    fewest = len(list(_cut(in_order, token_budget, packed, most_seen)))
    too_low, enough = 0, token_budget
    while enough - too_low > max(1, token_budget // 256):
        between = (too_low + enough) // 2
        if len(list(_cut(in_order, between, packed, most_seen))) > fewest:
            too_low = between
        else:
            enough = between
    return list(_cut(in_order, enough, packed, most_seen))


def _cut(
    in_order: Sequence[LearnerSample], most_tokens: int, packed: bool, most_seen: int | None = None
) -> Iterator[list[LearnerSample]]:
    """Groups of neighbours, each as large as it may be."""
    batch: list[LearnerSample] = []
    tokens = seen = 0
    for sample in in_order:
        length = sample_length(sample)
        if not batch:
            more = length
        elif packed:  # a prompt that the one before has is there already
            same = sample.prompt_ids == batch[-1].prompt_ids
            more = len(sample.response_ids) + (0 if same else len(sample.prompt_ids))
        else:
            more = sample_length(batch[0])
        is_too_much = tokens + more > most_tokens or (most_seen is not None and seen + length > most_seen)
        if batch and is_too_much:
            yield batch
            batch, tokens, seen, more = [], 0, 0, length
        batch.append(sample)
        tokens += more
        seen += length
    if batch:
        yield batch


def _by_prompt(samples: Sequence[LearnerSample]) -> list[LearnerSample]:
    """Those with the same prompt together, since it is computed once for all of them."""
    groups: dict[tuple[int, ...], list[LearnerSample]] = {}
    for sample in sorted(samples, key=sample_length, reverse=True):
        groups.setdefault(sample.prompt_ids, []).append(sample)
    return [sample for group in groups.values() for sample in group]


def batch_tokens(samples: Sequence[LearnerSample], packed: bool) -> int:
    """Tokens that a forward pass over these samples computes."""
    return (packed_tokens if packed else padded_tokens)(token_pairs(samples))


def token_pairs(samples: Sequence[LearnerSample]) -> list[TokenPair]:
    """Prompt and response of each."""
    return [(sample.prompt_ids, sample.response_ids) for sample in samples]


def loss_masks(samples: Sequence[LearnerSample]) -> list[tuple[bool, ...]] | None:
    """Return the loss mask of each response; None if every token of every response is an action's."""
    masks = [sample.loss_mask for sample in samples]
    return None if all(map(all, masks)) else masks


def sample_length(sample: LearnerSample) -> int:
    """Tokens of prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)
