"""Prefetched results: in order, one at a time, while the one before is in use."""

from __future__ import annotations

import threading

import pytest

from hacrl.training.learner import Learner
from hacrl.training.prefetch import Prefetch
from hacrl.training.samples import SampleBuilder
from tests.training.runs import HACPO, Runs

PATIENCE = 60  # seconds until a test that hangs fails


def test_each_begins_when_the_one_before_is_fetched() -> None:
    begun = [threading.Event() for _ in range(3)]

    def maker(number: int):
        def make() -> int:
            begun[number].set()
            return 10 * number

        return make

    with Prefetch([maker(number) for number in range(3)]) as made:
        for number in range(3):
            assert begun[number].wait(PATIENCE)
            assert not any(event.is_set() for event in begun[number + 1 :])  # one at a time
            assert made.next() == 10 * number
    assert all(event.is_set() for event in begun)


def test_an_error_is_raised_where_its_result_is_fetched() -> None:
    def fail() -> int:
        raise ValueError("no such tokens")

    with Prefetch([lambda: 1, fail, lambda: 3]) as made:
        assert made.next() == 1
        with pytest.raises(ValueError, match="no such tokens"):
            made.next()


def test_leaving_early_waits_for_what_is_being_made_and_begins_nothing_more() -> None:
    made, begun, go = [], threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go.wait(PATIENCE)
        made.append("second")

    def leave_early() -> None:
        with Prefetch([lambda: None, slow, lambda: made.append("third")]) as results:
            results.next()
            assert begun.wait(PATIENCE)
            go.set()
            raise KeyError

    with pytest.raises(KeyError):
        leave_early()
    assert made == ["second"]


def test_the_next_learners_samples_are_built_while_the_one_before_learns(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = runs("char", "pair", method=HACPO, steps=2)
    build, learn = SampleBuilder.build, Learner.learn
    built = {"char": threading.Event(), "pair": threading.Event()}
    seen = []

    def building(builder: SampleBuilder, *given: object):
        samples = build(builder, *given)
        built[builder._learner.name].set()
        return samples

    def learning(learner: Learner, *given: object):
        if learner.agent.name == "char":  # the first of two: the other's are ready before it is done
            seen.append(built["pair"].wait(PATIENCE))
        stats = learn(learner, *given)
        built[learner.agent.name].clear()
        return stats

    monkeypatch.setattr(SampleBuilder, "build", building)
    monkeypatch.setattr(Learner, "learn", learning)
    watched = runs("char", "pair", method=HACPO, steps=2)
    assert seen == [True, True]
    assert [watched.of(name) for name in ("char", "pair")] == [plain.of(name) for name in ("char", "pair")]
