"""Engines with weights of their own that are apart: each is brought to its policy and asked by itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from hacrl.engines.hf.engine import TransformersEngine
from hacrl.runs.run import LocalRun
from hacrl.tracking.progress import RunProgress
from hacrl.training.observer import Observer
from hacrl.training.trainer import TrainingInterrupted
from tests.training.runs import Runs

SECONDS = 30.0  # far more than is needed
Prepare = Callable[[str, int], None]  # told whose engine is to be brought to which policy


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[Prepare], None]:
    """Make all engines such ones; the test says what bringing weights to one means."""

    def patch(prepare: Prepare) -> None:
        known: dict[str, int] = {}

        def once(engine: TransformersEngine, proven: bool = True) -> None:
            name, version = engine.policy.name, engine.policy.policy_version
            if known.get(name) != version:
                prepare(name, version)
                known[name] = version

        monkeypatch.setattr(TransformersEngine, "runs_concurrently", True)
        monkeypatch.setattr(TransformersEngine, "shares_weights", False)
        monkeypatch.setattr(TransformersEngine, "prepare", once)

    return patch


class Watch(Observer):
    """Everything in order, and in which threads it was told."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        self.on: dict[tuple[str, str], Callable[[], None]] = {}

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        self.threads.add(threading.get_ident())
        self.phases.append((phase, agent))
        self.on.pop((phase, agent), lambda: None)()

    def on_response(self, agent: str) -> None:
        self.threads.add(threading.get_ident())
        self.on.pop(("response", agent), lambda: None)()


def test_one_answers_while_the_other_gets_its_weights(runs: Runs, apart) -> None:
    watch = Watch()
    pair_has_answered = threading.Event()

    def prepare(agent: str, version: int) -> None:
        if agent == "char":
            assert pair_has_answered.wait(SECONDS)
            time.sleep(0.2)

    apart(prepare)
    watch.on["response", "pair"] = pair_has_answered.set
    with LocalRun(runs.config("char", "pair", steps=1), [watch]) as run:
        run.train()
    assert sorted(watch.phases[:2]) == [("sync", "char"), ("sync", "pair")]
    assert watch.phases[2:] == [
        ("rollout", "pair"),
        ("rollout", "char"),
        ("verify", "char"),
        ("verify", "pair"),
        ("learn", "char"),
        ("learn", "pair"),
    ]
    assert watch.threads == {threading.get_ident()}
    seconds = json.loads((run.result.folder / "timings.jsonl").read_text())
    # char's weights took 0.2 s at least, which are no part of the time for its responses
    assert seconds["sync/char"] >= 0.2
    assert seconds["rollout/pair"] > 0
    assert seconds["sync/char"] + seconds["rollout/char"] < seconds["whole"]


def test_an_interruption_before_anybody_answers(runs: Runs, apart) -> None:
    """Both engines are brought to their policies; then nobody is asked."""
    watch, prepared = Watch(), []
    both = threading.Barrier(2, timeout=SECONDS)

    def prepare(agent: str, version: int) -> None:
        prepared.append(agent)
        if both.wait() == 0:
            run.interrupt()
        both.wait()

    apart(prepare)
    with LocalRun(runs.config("char", "pair", steps=1), [watch]) as run:
        run.train()
    assert run.is_interrupted
    assert sorted(prepared) == ["char", "pair"]
    assert sorted(watch.phases) == [("sync", "char"), ("sync", "pair")]
    assert run.trainer.phases_done == 0


def test_an_interruption_while_one_answers_waits_for_both(runs: Runs, apart) -> None:
    watch = Watch()
    is_interrupted = threading.Event()

    def prepare(agent: str, version: int) -> None:
        if agent == "char":
            assert is_interrupted.wait(SECONDS)

    def interrupt() -> None:
        run.interrupt()
        is_interrupted.set()

    apart(prepare)
    watch.on["response", "pair"] = interrupt
    with LocalRun(runs.config("char", "pair", steps=1), [watch]) as run:
        run.train()
    assert run.is_interrupted
    assert watch.phases[2:] == [
        ("rollout", "pair"),
        ("rollout", "char"),
        ("verify", "char"),
        ("verify", "pair"),
    ]
    assert run.trainer.phases_done == 2


def test_an_engine_that_gets_no_weights_ends_the_step_and_the_other_leaves_off(runs: Runs, apart) -> None:
    watch = Watch()

    def prepare(agent: str, version: int) -> None:
        if agent == "char":
            raise RuntimeError("the engine of char is gone")

    apart(prepare)
    with (
        LocalRun(runs.config("char", "pair", steps=1), [watch]) as run,
        pytest.raises(RuntimeError, match="the engine of char is gone"),
    ):
        run.train()
    assert {("verify", "char"), ("rollout", "char"), ("verify", "pair")}.isdisjoint(watch.phases)
    assert not any(thread.name.startswith("hacrl-ask-") for thread in threading.enumerate())


def test_evaluations_side_by_side_are_shown(runs: Runs, apart) -> None:
    apart(lambda agent, version: None)
    written = StringIO()
    progress = RunProgress("a run", ["char", "pair"], 1, Console(file=written, width=100))
    config = runs.config("char", "pair", steps=1, evaluation={"problems": 4})
    with progress, LocalRun(config, [progress]) as run:
        run.train()
    assert run.trainer.steps_done == 1
    assert "step 1" in written.getvalue()


def test_engines_give_back_what_they_can_and_what_happened_to_them_is_told(
    runs: Runs, apart, monkeypatch
) -> None:
    rested, told = [], Notes()
    monkeypatch.setattr(TransformersEngine, "rest", lambda self: rested.append(self.agent.name))
    monkeypatch.setattr(TransformersEngine, "take_notes", lambda self: [f"{self.agent.name} died"])
    apart(lambda agent, version: None)
    with LocalRun(runs.config("char", "pair", steps=1), [told]) as run:
        run.train()
    assert sorted(rested) == ["char", "pair"]
    assert [note for note in told.notes if "died" in note] == ["char died", "pair died"]


def test_after_an_error_nobody_answers_any_more(runs: Runs, apart) -> None:
    apart(lambda agent, version: None)
    watch = Watch()
    watch.on["response", "char"] = fail
    with LocalRun(runs.config("char", "pair", steps=1), [watch]) as run, pytest.raises(ZeroDivisionError):
        run.train()
    run.trainer.interrupt()
    with pytest.raises(TrainingInterrupted):  # at once, as nobody has begun to answer
        run.trainer.step(1)


def fail() -> None:
    raise ZeroDivisionError


class Notes(Observer):
    """All that users are told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)
