"""The threads of an asynchronous run: events come to the thread that waits, and no wait is endless."""

from __future__ import annotations

import threading

import pytest

from hacrl.training.asynchronous import jobs
from hacrl.training.asynchronous.jobs import LaneThreads
from hacrl.training.asynchronous.schedule import Job
from hacrl.training.observer import Observer
from hacrl.training.reporter import Reporter

SECONDS = 30.0
SAMPLE, LEARN = Job("sample", "ada", 2), Job("learn", "ada", 1)


class Phases(Observer):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, threading.Thread]] = []

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        self.seen.append((phase, agent, threading.current_thread()))

    def on_response(self, agent: str) -> None:
        self.seen.append(("response", agent, threading.current_thread()))


def test_an_agents_lanes_run_side_by_side_and_their_events_come_to_the_thread_that_waits() -> None:
    phases = Phases()
    lanes = LaneThreads(phases)
    is_learning, has_sampled = threading.Event(), threading.Event()
    names: dict[str, str] = {}

    def sample(events: Observer) -> str:
        names["sample"] = threading.current_thread().name
        reporter = Reporter(events).agent("ada")
        with reporter.phase("rollout"):
            assert is_learning.wait(SECONDS)  # ends only if the other lane runs meanwhile
            reporter.responses(2)
        has_sampled.set()
        return "rollouts"

    def learn(events: Observer) -> str:
        names["learn"] = threading.current_thread().name
        is_learning.set()
        assert has_sampled.wait(SECONDS)
        return "report"

    lanes.start(SAMPLE, sample)
    lanes.start(LEARN, learn)
    found = {}
    for _ in range(2):
        ended = lanes.next(SECONDS)
        assert ended is not None
        found[ended.job] = ended.result
    assert found == {SAMPLE: "rollouts", LEARN: "report"}
    assert [seen[:2] for seen in phases.seen] == [
        ("rollout", "ada"),
        ("response", "ada"),
        ("response", "ada"),
    ]
    assert {seen[2] for seen in phases.seen} == {threading.current_thread()}
    assert names == {"sample": "hacrl-engine-ada", "learn": "hacrl-learner-ada"}
    assert lanes.next(0.0) is None
    assert (lanes.close(), lanes.running) == ([], [])


def test_closing_returns_what_has_ended_and_leaves_behind_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ABANDON_SECONDS", 0.2)
    phases, is_over = Phases(), threading.Event()
    lanes = LaneThreads(phases)

    def hang(events: Observer) -> None:
        assert is_over.wait(SECONDS)
        Reporter(events).agent("ada").responses(1)

    lanes.start(LEARN, hang)
    lanes.start(SAMPLE, lambda events: "rollouts")
    lanes.start(Job("sample", "bob", 1), fail)
    ended = {one.job.agent: one for one in lanes.close()}
    assert ended["ada"].result == "rollouts"
    assert isinstance(ended["bob"].error, ZeroDivisionError)
    assert lanes.running == [LEARN]
    is_over.set()
    for thread in lanes._threads:
        thread.join(SECONDS)
    assert phases.seen == []  # what comes after the end is not handled


def fail(events: Observer) -> None:
    raise ZeroDivisionError
