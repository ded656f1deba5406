"""The ideal schedule that the engine is measured against, on numbers worked out by hand."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # scripts, no package
ideal = import_module("ideal_schedule")


def plan(lengths: Sequence[int], slots: int) -> list[tuple[int, int]]:
    return [(stretch.running, stretch.steps) for stretch in ideal.longest_first(lengths, slots)]


@pytest.mark.parametrize(
    ("lengths", "slots", "expected"),
    [
        # 4 and 3 begin; at 3 the slot of 3 takes 2 and ends at 5; at 4 the other takes 1 and ends at 5
        ([1, 2, 3, 4], 2, [(2, 3), (2, 1), (2, 1)]),
        # 5 and 1; at 1 the other 1; from 2 on the long one is alone until 5
        ([1, 5, 1], 2, [(2, 1), (2, 1), (1, 3)]),
        # more slots than responses: all begin at once and leave one by one
        ([3, 1, 3, 2], 8, [(4, 1), (3, 1), (2, 1)]),
        ([7], 4, [(1, 7)]),
        ([2, 2, 2], 1, [(1, 2), (1, 2), (1, 2)]),
        ([0, 2], 2, [(1, 2)]),
        ([], 3, []),
    ],
)
def test_longest_first(lengths: list[int], slots: int, expected: list[tuple[int, int]]) -> None:
    assert plan(lengths, slots) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_schedule_is_that_of_a_step_by_step_simulation(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 60))]
    slots = rng.randint(1, 12)
    waiting, running, sizes = sorted(lengths), [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop())
        sizes.append(len(running))
        running = [left - 1 for left in running if left > 1]
    assert [running for running, steps in plan(lengths, slots) for _ in range(steps)] == sizes
    assert sum(sizes) == sum(lengths)


def test_a_plain_loop_waits_for_the_longest_of_each_batch() -> None:
    # two batches of two and one of one: 5 + 2 + 3 steps
    found = [(stretch.running, stretch.steps) for stretch in ideal.in_batches([5, 1, 2, 2, 3], 2)]
    assert found == [(2, 5), (2, 2), (1, 3)]


def test_steps_between_measured_sizes_lie_on_a_line_and_beyond_them_in_proportion() -> None:
    times = ideal.StepTimes({8: 3.0, 2: 1.0, 1: 0.9})
    assert times.at(1) == 0.9
    assert times.at(2) == 1.0
    assert times.at(5) == pytest.approx(2.0)  # halfway between 2 and 8
    assert times.at(8) == 3.0
    assert times.at(16) == pytest.approx(6.0)
    assert ideal.StepTimes({4: 2.0}).at(1) == 2.0  # a smaller batch is no faster than what was measured


def test_seconds_of_a_schedule() -> None:
    # [5, 1, 1] on two slots: 2 steps for two responses, 3 for one: 2 * 1.5 + 3 * 1
    times = ideal.StepTimes({1: 1.0, 2: 1.5})
    assert ideal.seconds_of(ideal.longest_first([5, 1, 1], 2), times) == pytest.approx(6.0)
