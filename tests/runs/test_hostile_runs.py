"""Damaged or malicious run folders: refused with one message, and nothing outside is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hacrl.cli.compare import run_comparison
from hacrl.config.load import build_config, config_to_yaml, load_config
from hacrl.config.schema import BenchmarkSettings
from hacrl.errors import ConfigError, HacrlError, ModelError
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import evaluate_targets
from hacrl.evaluation.targets import default_output, resolve_targets
from hacrl.runs.results import read_finished, read_result
from hacrl.runs.run import run_locally
from hacrl.studies.compare import PlannedRun
from hacrl.studies.execution import run_study
from tests.support.tiny import save_agents


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two agents and three steps."""
    folder = tmp_path_factory.mktemp("finished")
    models = save_agents(folder / "models")
    config = build_config(
        {
            "agents": [{"name": name, "model": path} for name, path in models.items()],
            "output": str(folder / "run"),
            "steps": 3,
            "threads": 1,
            "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
            "evaluation": {"problems": 2, "samples_per_problem": 1},
        }
    )
    run_locally(config)
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the run that a test may damage, with a foreign file beside it."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "mine.txt").write_text("mine")
    return tmp_path / "run"


def change_lines(path: Path, change: Callable[[list[dict]], list[dict]]) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def test_the_folder_of_a_killed_run_is_read_and_noted(run):
    whole = read_result(run)
    assert [len(rewards) for rewards in whole.rewards.values()] == [3, 3]
    assert (sorted(whole.accuracies), whole.notes) == ([0, 3], [])
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        os.truncate(run / name, (run / name).stat().st_size - 9)
    cut = read_result(run)
    assert list(cut.rewards.values()) == [r[:2] for r in whole.rewards.values()]
    assert cut.accuracies == {0: whole.accuracies[0]}
    assert [note.rsplit("/", 1)[-1] for note in cut.notes] == [
        "evaluations.jsonl: the last line (line 2) is incomplete and is ignored",
        "metrics.jsonl: the last line (line 3) is incomplete and is ignored",
    ]
    with pytest.raises(
        ConfigError, match=r"does not hold a complete run: metrics\.jsonl ends after step 2 of 3"
    ):
        read_finished(run, 3, whole.rewards)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("metrics", lambda lines: [lines[0], lines[2]], "line 2, is damaged: step 3 follows step 1"),
        ("metrics", lambda lines: [lines[0], *lines], "line 2, is damaged: step 1 follows step 1"),
        (
            "metrics",
            lambda lines: [{"a": 1}, *lines],
            "line 1, is damaged or of another version: step: missing",
        ),
        ("metrics", lambda lines: [{**lines[0], "agents": []}], "agents: must be a mapping"),
        (
            "metrics",
            lambda lines: [{"step": 1, "agents": {"char": {"rollout": {"reward": "1"}, "learning": {}}}}],
            r"agents\.char\.rollout\.reward: must be a valid number",
        ),
        (
            "evaluations",
            lambda lines: [lines[1], lines[0]],
            "line 2, is damaged: step 0 is repeated or out of order",
        ),
        (
            "evaluations",
            lambda lines: [{"step": 0, "agents": {"char": {"mean": 1.0}}}],
            r"agents\.char\.stderr: missing",
        ),
    ],
)
def test_a_damaged_record_is_refused(run, name, change, words):
    change_lines(run / f"{name}.jsonl", change)
    with pytest.raises(ConfigError, match=rf"{name}\.jsonl, {words}|{words}"):
        read_result(run)


@settings(
    derandomize=True, deadline=None, max_examples=100, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_any_damage_to_lines_is_one_message(finished, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        content = (finished / name).read_bytes()
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 30)))
        new = data.draw(
            st.binary(max_size=6) | st.sampled_from([b"null", b"-1e999", b"[]", b"{}", b"\n", b'"x"'])
        )
        (folder / name).write_bytes(content[:start] + new + content[end:])
    try:
        result = read_result(folder)
    except HacrlError as error:
        message = str(error)
    else:
        assert all(isinstance(one, float) for rewards in result.rewards.values() for one in rewards)
        return
    assert message.startswith(str(folder))
    assert "\n" not in message


# comparing


def planned(run: Path, study: Path) -> PlannedRun:
    """The run as one of a study, finished."""
    folder = study / "hacpo" / "seed-0"
    folder.parent.mkdir(parents=True)
    shutil.copytree(run, folder)
    config = replace(load_config(run / "config.yaml"), output=str(folder))
    (folder / "config.yaml").write_text(config_to_yaml(config), encoding="utf-8")
    return PlannedRun("hacpo", 0, config)


def nothing(*_: object) -> None:
    """A callback for studies that does nothing."""


def test_a_study_does_not_accept_an_unfinished_run(run, tmp_path):
    one = planned(run, tmp_path / "study")
    assert sorted(run_study([one])["hacpo", 0].accuracies) == [0, 3]
    change_lines(one.folder / "evaluations.jsonl", lambda lines: lines[:1])
    words = rf"has no accuracy of char, pair after step 3; delete {one.folder} to repeat this run"
    with pytest.raises(ConfigError, match=words):
        run_study([one])


@pytest.mark.parametrize("kind", ["pipe", "link", "binary"])
def test_a_study_refuses_an_invalid_config(kind, run, tmp_path):
    one = planned(run, tmp_path / "study")
    config = one.folder / "config.yaml"
    text = config.read_bytes()
    config.unlink()
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "link":
        (tmp_path / "elsewhere.yaml").write_bytes(text)
        config.symlink_to(tmp_path / "elsewhere.yaml")
    else:
        config.write_bytes(b"\xff" + text)
    words = {"pipe": "is a pipe", "link": "leads out of", "binary": "is not UTF-8"}[kind]
    with pytest.raises(ConfigError, match=rf"config\.yaml {words}"):
        run_study([one])


def test_a_study_stays_in_its_folder(run, tmp_path):
    one = planned(run, tmp_path / "study")
    shutil.move(one.folder, tmp_path / "moved")
    one.folder.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"seed-0 leads out of"):
        run_study([one], overwrite=True)
    (tmp_path / "study" / "study.md").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match=r"study\.md leads out of"):
        run_comparison(Path("demo"), ["hacpo"], 1, 1, tmp_path / "study", [], overwrite=False)
    (tmp_path / "study" / "study.md").unlink()
    os.mkfifo(tmp_path / "study" / "study.md")
    with pytest.raises(ConfigError, match=r"study\.md is a pipe"):
        run_comparison(Path("demo"), ["hacpo"], 1, 1, tmp_path / "study", [], overwrite=False)
    assert (tmp_path / "mine.txt").read_text() == "mine"


# evaluating


def test_a_config_cannot_redirect_writes(run, tmp_path):
    """Nothing is written to the old ``output`` of a moved folder; agents' names are not used as paths."""
    path = run / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace(f"output: {load_config(path).output}", f"output: {tmp_path / 'trap'}"))
    assert load_config(path).output == str(tmp_path / "trap")
    request = EvaluationRequest(targets=(str(run),), settings=BenchmarkSettings(limit=1), device="cpu")
    assert evaluate_targets(request)[1] == run / "evaluations" / "task"
    assert not (tmp_path / "trap").exists()
    for name in ("../../x", "/x", "..", "a\\0b"):
        path.write_text(text.replace("name: char", f'name: "{name}"'))
        with pytest.raises(ConfigError, match="becomes a folder name"):
            resolve_targets([str(run)])


def test_links_out_of_the_folder_are_refused(run, tmp_path):
    assert len(resolve_targets([str(run)])) == 2
    (tmp_path / "elsewhere").mkdir()
    (run / "evaluations").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"evaluations/task leads out of"):
        default_output(resolve_targets([str(run)]), ["task"])
    weights = run / "agents" / "char" / "model.safetensors"
    shutil.move(weights, tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere" / "model.safetensors")
    for target in (run, run / "agents" / "char"):
        with pytest.raises(ConfigError, match=r"char/model\.safetensors leads out of"):
            resolve_targets([str(target)])
    weights.unlink()
    os.mkfifo(weights)  # opened, it would wait for ever
    with pytest.raises(ConfigError, match=r"model\.safetensors is a pipe"):
        resolve_targets([str(run)])
    shutil.rmtree(run / "agents" / "char")
    (run / "agents" / "char").symlink_to(load_config(run / "config.yaml").agents[0].model)
    with pytest.raises(ConfigError, match=r"agents/char leads out of"):
        resolve_targets([str(run)])


def test_an_invalid_config_is_named(run, tmp_path):
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    for target in (run, run / "agents" / "char"):
        with pytest.raises(ConfigError, match=r"config\.yaml is a pipe"):
            resolve_targets([str(target)])
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match=r"config\.yaml leads out of"):
        resolve_targets([str(run)])
    for target in (str(tmp_path / "mine.txt"), "./" + "x" * 300, "~nobody-has-this-name/x"):
        with pytest.raises(ModelError, match=r"is a file|does not exist"):
            resolve_targets([target])


def test_a_config_of_another_tool_beside_a_model_is_ignored(tmp_path):
    models = save_agents(tmp_path / "models")
    (tmp_path / "config.yaml").write_text("site: [")
    assert resolve_targets([models["char"]])[0].run is None


def test_the_command_line_prints_one_message(run):
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    command = [sys.executable, "-m", "hacrl", "eval", str(run), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: config file cannot be read: {run}/config.yaml is a pipe, not a file\n"
