"""Rules for every tool: when it starts, that its failure never stops the run, and early errors."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hacrl.errors import ConfigError
from hacrl.tracking.base import Backend, Tracker
from hacrl.tracking.registry import BACKENDS, make_trackers, tracked_run
from tests.tracking.scenario import AGENTS, accuracies, config, play, report, rollouts


class Recorder(Backend):
    """Writes down what it is asked to do, and fails where it is told to."""

    def __init__(self, fails_at: str = "", error: type[BaseException] = OSError) -> None:
        self.calls: list[tuple] = []
        self._fails_at = fails_at
        self._error = error

    def _call(self, name: str, *values) -> None:
        self.calls.append((name, *values))
        if name == self._fails_at:
            raise self._error("the network is gone")

    def start(self, run):
        self._call("start", run.name)

    def log_scalars(self, step, scalars):
        self._call("scalars", step, len(scalars))

    def log_rollouts(self, step, rows):
        self._call("rollouts", step, [row.agent for row in rows])

    def finish(self, succeeded):
        self._call("finish", succeeded)


def tracker_on(tmp_path: Path, backend: Backend) -> Tracker:
    return Tracker("recorder", backend, tracked_run(config(tmp_path), tmp_path / "pair"))


def test_a_whole_run(tmp_path):
    backend = Recorder()
    play(tracker_on(tmp_path, backend))
    steps = [call[:2] for call in backend.calls]
    expected = [("start", "pair"), ("scalars", 0)]
    expected += [("scalars", 1), ("rollouts", 1), ("scalars", 2), ("rollouts", 2), ("scalars", 2)]
    assert steps == [*expected, ("finish", True)]
    assert backend.calls[3] == ("rollouts", 1, ["qwen", "qwen", "llama", "llama"])


def test_nothing_is_started_before_something_happens(tmp_path):
    """A run whose models cannot be loaded never begins, and has nothing to finish."""
    backend = Recorder()
    tracker_on(tmp_path, backend).on_end()
    assert backend.calls == []


def test_a_run_that_saved_no_agents_has_failed(tmp_path):
    backend = Recorder()
    play(tracker_on(tmp_path, backend), saved=False)
    assert backend.calls[-1] == ("finish", False)
    backend = Recorder()
    tracker = tracker_on(tmp_path, backend)
    tracker.on_phase(2, "save", AGENTS[0])  # one of two
    tracker.on_end()
    assert backend.calls[-1] == ("finish", False)


def test_the_run_is_closed_once_and_later_events_are_ignored(tmp_path):
    backend = Recorder()
    tracker = tracker_on(tmp_path, backend)
    play(tracker)
    calls = list(backend.calls)
    tracker.on_evaluation(2, accuracies(2))
    tracker.on_rollouts(3, "qwen", rollouts("qwen"))
    tracker.on_step(report(3), {})
    tracker.on_end()
    assert backend.calls == calls


@pytest.mark.parametrize("part", ["scalars", "rollouts", "finish"])
def test_a_tool_that_fails_is_reported_once_and_switched_off(tmp_path, capsys, part):
    backend = Recorder(fails_at=part)
    play(tracker_on(tmp_path, backend))  # does not raise
    assert [call[0] for call in backend.calls].count(part) == 1
    assert backend.calls[-1][0] == part  # nothing after it
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    for words in ("tracker recorder failed", "OSError: the network is gone", str(tmp_path / "pair")):
        assert words in said.err
    assert said.out == ""


def test_ctrl_c_is_not_swallowed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        play(tracker_on(tmp_path, Recorder(fails_at="scalars", error=KeyboardInterrupt)))


def test_a_tool_that_cannot_start_is_an_error(tmp_path):
    backend = Recorder(fails_at="start")
    tracker = tracker_on(tmp_path, backend)
    with pytest.raises(ConfigError, match="trackers: recorder could not start: OSError: the network is gone"):
        play(tracker)
    tracker.on_end()
    assert backend.calls == [("start", "pair")]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no tracker 'wandbb'; did you mean 'wandb'"):
        make_trackers(config(tmp_path, "wandbb"), tmp_path)
    with pytest.raises(
        ConfigError, match=r"no tracker 'excel'\. Valid names: tensorboard, wandb, trackio, mlflow, "
    ):
        make_trackers(config(tmp_path, "excel"), tmp_path)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch, name):
    monkeypatch.setattr("hacrl.tracking.registry.find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        make_trackers(config(tmp_path, name), tmp_path)
    for words in (f"trackers: {name} needs", f"pip install 'hacrl[{name}]'", f"pip install {name}"):
        assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_names_of_packages_are_right():
    """The refusal above rests on find_spec: at least the tool that is installed here must be found."""
    assert find_spec("tensorboard") is not None


def test_a_name_given_twice_tracks_once(tmp_path):
    assert len(make_trackers(config(tmp_path, "tensorboard", "tensorboard"), tmp_path)) == 1
    assert make_trackers(config(tmp_path), tmp_path) == []


def test_what_a_tracker_is_told(tmp_path):
    run = tracked_run(config(tmp_path, project="papers"), tmp_path / "first")
    assert (run.project, run.name, run.agents) == ("papers", "first", ("qwen", "llama"))
    assert run.config["learning"]["lr"] == 0.125
    assert "lr: 0.125" in run.config_yaml


def test_no_tool_is_imported_unless_it_is_used(tmp_path):
    code = (
        "import sys, hacrl.tracking.registry, hacrl.tracking.base\n"
        "import hacrl.tracking.wandb, hacrl.tracking.mlflow\n"
        "import hacrl.tracking.trackio, hacrl.tracking.tensorboard\n"
        "print(sorted({'tensorboard', 'wandb', 'mlflow', 'trackio'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
