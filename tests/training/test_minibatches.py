"""How samples are cut into mini-batches and micro-batches."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hacrl.training import batching
from hacrl.training.batching import batch_tokens, micro_batches, minibatches, needed_tokens
from hacrl.types import LearnerSample


def made(index: int, own: bool = True, prompt: int = 1, response: int = 1) -> LearnerSample:
    """Return a sample whose advantage is its index."""
    return LearnerSample((4,) * prompt, (5,) * response, None, -1.0, 1, "x", own, float(index))


def indices(batch: list[LearnerSample]) -> list[int]:
    return [int(one.advantage) for one in batch]


MIXED = [made(i, own=i % 2 == 0) for i in range(10)]


@pytest.mark.parametrize(
    ("updates", "epochs", "sizes"),
    [
        (1, 1, [10]),
        (2, 1, [5, 5]),
        (3, 1, [3, 3, 4]),  # edges at 10 * i // 3 = 0, 3, 6, 10
        (4, 1, [2, 3, 2, 3]),  # 0, 2, 5, 7, 10
        (4, 2, [5, 5, 5, 5]),
        (3, 2, [6, 7, 7]),  # 20 * i // 3 = 0, 6, 13, 20
        (12, 1, [1] * 10),  # fewer samples than updates: empty ones make none
    ],
)
def test_sizes_and_every_sample_once_a_pass(updates: int, epochs: int, sizes: list[int]) -> None:
    batches = minibatches(MIXED, updates, epochs, "mixed", seed=0)
    assert [len(batch) for batch in batches] == sizes
    used = [index for batch in batches for index in indices(batch)]
    assert Counter(used) == dict.fromkeys(range(10), epochs)
    assert sorted(used[:10]) == list(range(10))  # an epoch ends before the next begins


def test_mixed_is_a_shuffle_that_depends_on_the_seed_alone() -> None:
    orders = [indices(minibatches(MIXED, 1, 1, "mixed", seed)[0]) for seed in range(20)]
    random.seed(99)  # the global generator plays no part
    assert [indices(minibatches(MIXED, 1, 1, "mixed", seed)[0]) for seed in range(20)] == orders
    assert len({tuple(order) for order in orders}) == 20
    # 20 first places are not all the same kind: own and others' really mix
    assert {index % 2 for order in orders for index in order[:1]} == {0, 1}


def test_passes_are_shuffled_anew() -> None:
    first, second = minibatches(MIXED, 2, 2, "mixed", seed=0)
    assert indices(first) != indices(second)


def test_self_first_keeps_each_part_shuffled() -> None:
    seen = set()
    for seed in range(20):
        order = indices(minibatches(MIXED, 1, 1, "self_first", seed)[0])
        assert sorted(order[:5]) == [0, 2, 4, 6, 8]
        assert sorted(order[5:]) == [1, 3, 5, 7, 9]
        seen.add((tuple(order[:5]), tuple(order[5:])))
    assert len({own for own, _ in seen}) > 15
    assert len({cross for _, cross in seen}) > 15


def test_self_first_starts_again_in_every_pass() -> None:
    order = [i for batch in minibatches(MIXED, 4, 2, "self_first", seed=1) for i in indices(batch)]
    assert [i % 2 for i in order] == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5


def test_no_samples_no_updates() -> None:
    assert minibatches([], 4, 1, "mixed", seed=0) == []


def test_micro_batches_fit_the_budget_longest_first() -> None:
    # prompt + response: 9, 3, 6, 5, 3, 2 (prompts count); budget 12.
    # longest 9: 12 // 9 = 1 alone; 6: 12 // 6 = 2 with 5; 3: 12 // 3 = 4, three are left
    lengths = [(4, 5), (1, 2), (3, 3), (4, 1), (2, 1), (1, 1)]
    samples = [made(i, prompt=p, response=r) for i, (p, r) in enumerate(lengths)]
    assert [indices(batch) for batch in micro_batches(samples, 12)] == [[0], [2, 3], [1, 4, 5]]


def test_a_sample_over_the_budget_has_its_own_micro_batch() -> None:
    samples = [made(0, response=3), made(1, response=50), made(2, response=3)]
    # 51 > 8: alone; then 4 each, 8 // 4 = 2
    assert [indices(batch) for batch in micro_batches(samples, 8)] == [[1], [0, 2]]
    assert [indices(batch) for batch in micro_batches(samples, 1)] == [[1], [0], [2]]


def test_packed_micro_batches_are_as_few_as_can_be_and_about_equal() -> None:
    samples = [made(i, prompt=1 + i, response=999 - i) for i in range(10)]  # 1,000 tokens each
    for budget, sizes in {
        9999: [5, 5],
        10_000: [10],
        4500: [4, 4, 2],
        3500: [3, 3, 3, 1],
        999: [1] * 10,
    }.items():
        assert [len(batch) for batch in micro_batches(samples, budget, packed=True)] == sizes


def test_packed_samples_share_prompts_and_need_no_padding() -> None:
    # prompt + response: 4+5, 1+2, 3+3, 4+1, 2+1, 1+1, of which the first and the fourth have the same prompt,
    # and so have the second and the last. By prompt, longest first: 4+5 and 1, 3+3, 1+2 and 1, 2+1.
    lengths = [(4, 5), (1, 2), (3, 3), (4, 1), (2, 1), (1, 1)]
    samples = [made(i, prompt=p, response=r) for i, (p, r) in enumerate(lengths)]
    # budget 12: 9 + 1 = 10, and 6 more do not fit; 6 + 3 + 1 = 10, and 3 more do not fit; 3
    assert [indices(batch) for batch in micro_batches(samples, 12, packed=True)] == [[0, 3], [2, 1, 5], [4]]
    # budget 16 makes two: 10 + 6 and 3 + 1 + 3, or rather 10 and 6 + 3 + 1 + 3
    assert [indices(batch) for batch in micro_batches(samples, 16, packed=True)] == [[0, 3], [2, 1, 5, 4]]
    # budget 8: alone, its prompt is needed again; then 4 + 1, and 6 do not fit; ...
    assert [indices(batch) for batch in micro_batches(samples, 8, packed=True)] == [[0], [3], [2], [1, 5, 4]]
    assert batch_tokens(samples[:4], packed=True) == 4 + 5 + 1 + 2 + 3 + 3 + 1
    assert batch_tokens(samples[:3], packed=False) == 3 * 9


def test_padding_of_large_micro_batches_is_a_tenth_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 60, 50, 40 and 2 tokens; a micro-batch of 100 tokens is large enough for a device.

    60 + 50 of 120 are 92%, 60 + 50 + 40 of 180 only 83%. A row of 40 alone is not large enough, so the row
    of 2 tokens joins it, although half of that micro-batch is padding.
    """
    monkeypatch.setattr(batching, "FEW_TOKENS", 100)
    samples = [made(index, response=length - 1) for index, length in enumerate((40, 60, 2, 50))]
    assert [indices(batch) for batch in micro_batches(samples, 1000)] == [[1, 3], [0, 2]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [4096, 8192, 16384, 32768])
def test_lengths_that_differ_by_50_times_waste_less_than_a_tenth(packed: bool, budget: int) -> None:
    draw = random.Random(0)
    lengths = [round(80 * 50 ** draw.random()) for _ in range(128)]
    samples = [made(index, prompt=1 + index // 8, response=length) for index, length in enumerate(lengths)]
    batches = micro_batches(samples, budget, packed)
    computed = sum(batch_tokens(batch, packed) for batch in batches)
    assert needed_tokens(samples, packed) > 0.9 * computed
    assert sum(map(len, batches)) == 128
