"""Which problems are asked in which step."""

from __future__ import annotations

from collections import Counter

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.stream import ProblemStream
from hacrl.types import Problem
from tests.support.sevens import problem

PROBLEMS = [problem(f"{i}:") for i in range(10)]


def ids(batch: list[Problem]) -> list[str]:
    return [one.id for one in batch]


def test_an_epoch_contains_every_problem_once() -> None:
    stream = ProblemStream(PROBLEMS, batch_size=5, seed=0)
    for epoch in range(3):
        asked = ids(stream.batch(2 * epoch)) + ids(stream.batch(2 * epoch + 1))
        assert sorted(asked) == sorted(ids(PROBLEMS))


def test_each_epoch_has_its_own_order() -> None:
    stream = ProblemStream(PROBLEMS, batch_size=10, seed=0)
    orders = [tuple(ids(stream.batch(step))) for step in range(5)]
    assert len(set(orders)) == 5
    assert tuple(ids(PROBLEMS)) not in orders


def test_an_epoch_drops_an_incomplete_batch() -> None:
    # 10 problems in batches of 4: a pass has 2 batches, and two problems wait for another pass
    stream = ProblemStream(PROBLEMS, batch_size=4, seed=3)
    seen: Counter[str] = Counter()
    for epoch in range(40):
        first, second = ids(stream.batch(2 * epoch)), ids(stream.batch(2 * epoch + 1))
        assert len(set(first + second)) == 8
        seen.update(first + second)
    # 40 passes of 8 out of 10: each is asked 32 times on average, and none is always left out
    assert sum(seen.values()) == 320
    assert min(seen[one.id] for one in PROBLEMS) >= 24


def test_a_batch_never_holds_a_problem_twice() -> None:
    for size in (1, 3, 7, 10):
        stream = ProblemStream(PROBLEMS, size, seed=1)
        for step in range(30):
            assert len(set(ids(stream.batch(step)))) == size


def test_a_step_depends_on_the_seed_and_its_number_alone() -> None:
    forward = [ids(ProblemStream(PROBLEMS, 4, seed=5).batch(step)) for step in range(12)]
    stream = ProblemStream(PROBLEMS, 4, seed=5)
    backward = [ids(stream.batch(step)) for step in reversed(range(12))]
    assert backward[::-1] == forward
    other = [ids(ProblemStream(PROBLEMS, 4, seed=6).batch(step)) for step in range(12)]
    assert other != forward


def test_a_batch_larger_than_the_data_is_refused() -> None:
    ProblemStream(PROBLEMS, 10, seed=0)
    with pytest.raises(TaskError, match=r"rollout\.prompts_per_step=11, but the task has only 10 "):
        ProblemStream(PROBLEMS, 11, seed=0)
