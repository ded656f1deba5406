"""An interrupted run stops with every executor, keeps what it has, and finishes its step exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hacrl.engines.hf.engine import TransformersEngine
from hacrl.executors.local import LocalExecutor
from hacrl.runs.run import LocalRun
from hacrl.training.health.collapse import CollapseDetector
from hacrl.training.learner import Learner
from hacrl.training.observer import Observer
from hacrl.training.reporter import Reporter, TrainingInterrupted
from hacrl.training.worker import Assignment
from tests.support.rollouts import judged, rollout
from tests.support.tiny import char_agent
from tests.training.runs import Runs


class Events(Observer):
    """Interrupts the run at one event; records notes and phases."""

    def __init__(self, at: tuple[str, str] = ("", "")) -> None:
        self.at = at
        self.notes: list[str] = []
        self.phases: list[tuple[int, str, str]] = []
        self.run: LocalRun | None = None

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        self.phases.append((step, phase, agent))
        self._interrupt_at(phase, agent)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[Any]) -> None:
        self._interrupt_at("rollouts", agent)

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)

    def _interrupt_at(self, event: str, agent: str) -> None:
        if (event, agent) == self.at:
            assert self.run is not None
            self.at = ("", "")
            self.run.interrupt()


class WithoutPhases(LocalExecutor):
    """Calls the workers' plain verbs with plain records, as an executor with other processes does."""

    def answer(self, assignment: Any, agents: Any, reporter: Any) -> Iterator[Any]:
        for name in agents:
            yield name, self.workers[name].answer(assignment)

    def learn(self, groups: Any, capabilities: Any, step: int, agents: Any, reporter: Any) -> Iterator[Any]:
        for name in agents:
            yield name, self.workers[name].learn(groups, capabilities, step)


@pytest.fixture
def without_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.executors.workers.LocalExecutor", WithoutPhases)


@pytest.mark.parametrize("at", [("verify", "pair"), ("learn", "char")])
def test_a_step_that_was_interrupted_is_finished_in_the_same_process(runs: Runs, at: Any) -> None:
    expected = runs("char", "pair", steps=2).metrics_text
    events = Events(at)
    with LocalRun(runs.config("char", "pair", steps=2), [events]) as run:
        events.run = run
        with pytest.raises(TrainingInterrupted):
            run.trainer.train(2)
        assert run.trainer.phases_done > 0
        run.trainer.reporter = Reporter(run.observer)  # one that is not interrupted
        run.trainer.train(2)
    assert (run.result.folder / "metrics.jsonl").read_text() == expected


@pytest.mark.usefixtures("without_phases")
def test_a_run_is_interrupted_whatever_its_executor_announces(runs: Runs) -> None:
    events = Events(("rollouts", "char"))
    config = runs.config("char", "pair", steps=2)
    with LocalRun(config, [events]) as run:
        events.run = run
        run.train()
        assert run.is_interrupted
        assert run.trainer.steps_done == 0
        assert run.trainer.phases_done == 2  # both agents' rollouts are kept


@pytest.mark.usefixtures("without_phases")
def test_notes_of_workers_elsewhere_reach_the_user(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Learner.learn

    def noting(self: Learner, *arguments: Any) -> Any:
        stats = learn(self, *arguments)
        stats.notes.append(f"{self.agent.name} has learnt")
        return stats

    monkeypatch.setattr(TransformersEngine, "take_notes", lambda engine: [f"{engine.policy.name} has died"])
    monkeypatch.setattr(Learner, "learn", noting)
    events = Events()
    with LocalRun(runs.config("char", "pair", steps=1), [events]) as run:
        run.train()
    names = ("char", "pair")
    assert events.notes[-4:] == [*(f"{n} has died" for n in names), *(f"{n} has learnt" for n in names)]
    assert "has learnt" not in (run.result.folder / "metrics.jsonl").read_text()


def test_one_worker_s_answer_is_verified_before_an_interruption(runs: Runs) -> None:
    events = Events(("rollout", "char"))
    with LocalRun(runs.config("char", steps=1), [events]) as run:
        events.run = run
        problems = run.trainer.stream.batch(0)
        worker = run.trainer.executor.workers["char"]
        answer = worker.answer(Assignment("rollout", problems, 1), run.trainer.reporter.agent("char"))
        assert len(answer.rollouts) == 4 * 4
        with pytest.raises(TrainingInterrupted):
            worker.answer(Assignment("rollout", problems, 1), run.trainer.reporter.agent("char"))


def test_the_saved_counts_of_a_collapse_do_not_change_afterwards() -> None:
    """A checkpoint that is written in the background must not show a later step."""
    detector = CollapseDetector(["ada"])
    nothing = [judged(rollout(char_agent(), ""), 0.0)]
    detector.update({"ada": nothing})
    state = detector.state_dict()
    detector.update({"ada": nothing})
    assert state["counts"] == {"ada": {"no_reward": 1, "no_text": 1, "no_stop": 0}}
