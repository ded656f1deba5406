"""A resumed run ends exactly like an uninterrupted one; changes that make it another run are refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hacrl.cli.main import app
from hacrl.config.load import load_config
from hacrl.config.schema import RunConfig
from hacrl.engines.base import SyncReport
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import CheckpointError, ConfigError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.checkpoint import CheckpointStore
from hacrl.runs.resume import inspect_run, resume_point_of
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files

STEPS = 3


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    run_locally(chaos_config(folder, STEPS))
    return folder


class Interrupter(Observer):
    """Interrupts its run when the n-th phase begins: that phase is finished and no other begins."""

    def __init__(self, at: int) -> None:
        self.run: LocalRun | None = None
        self.left = at
        self.phases: list[tuple[int, Phase, str]] = []

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        self.phases.append((step, phase, agent))
        self.left -= 1
        if self.left == 0 and self.run is not None:
            self.run.interrupt()


def left_after(config: RunConfig, phases: int) -> list[tuple[int, Phase, str]]:
    """Run until the n-th phase is over; return all phases so far."""
    watch = Interrupter(phases)
    with LocalRun(config, [watch]) as run:
        watch.run = run
        run.train()
        run.save()
    return watch.phases


def go_on(folder: Path, *overrides: str) -> LocalRun:
    found = inspect_run(folder, overrides)
    assert found.finished_after is None
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
        run.save()
    return run


def status(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["state"]


# evaluation of two agents, then per step two rollouts, two verdicts, two learners; evaluation at the end
@pytest.mark.parametrize("phases", [1, 2, 3, 5, 6, 7, 8, 9, 12, 14, 20, 21])
def test_stopped_after_any_phase_and_resumed(calm, tmp_path, phases):
    folder = tmp_path / "run"
    seen = left_after(chaos_config(folder, STEPS), phases)
    assert status(folder) == "stopped"
    assert seen[-1][1] in ("evaluate", "rollout", "verify", "learn")
    run = go_on(folder)
    assert status(folder) == "finished"
    assert differing_files(calm, folder) == []
    assert sorted(run.result.accuracies) == [0, 3]
    assert len(run.result.rewards["small"]) == STEPS


def test_rollouts_of_an_unfinished_step_are_not_generated_again(tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 7)  # small has answered and learnt, llama has answered
    found = inspect_run(folder)
    watch = Interrupter(at=0)
    with LocalRun(found.config, [watch], resumed=found.point) as run:
        run.train()
    assert watch.phases[0] == (1, "learn", "llama")
    assert [phase for phase in watch.phases if phase[0] == 1] == [(1, "learn", "llama")]


class Crash(Observer):
    """Ends the run like a crash when a step's first learner begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (step, phase) == (self.step, "learn"):
            raise OSError("crash")


@pytest.mark.parametrize("every", [2, 10], ids=["after-a-checkpoint", "without-any"])
def test_steps_after_the_last_checkpoint_are_trained_again_from_the_log(calm, tmp_path, every):
    folder = tmp_path / "run"
    config = chaos_config(folder, STEPS, checkpoint={"every": every, "background": False})
    with pytest.raises(OSError, match="crash"), LocalRun(config, [Crash(step=3)]) as run:
        run.train()
    found = inspect_run(folder)
    watch = Interrupter(at=0)
    with LocalRun(found.config, [watch], resumed=found.point) as run:
        run.train()
        run.save()
    assert [phase for phase in watch.phases if phase[1] == "rollout"] == []  # all was in the log
    learnt = [step for step, phase, agent in watch.phases if (phase, agent) == ("learn", "llama")]
    assert learnt == ([3] if every == 2 else [1, 2, 3])
    assert differing_files(calm, folder) == []


def test_rollouts_of_another_policy_are_generated_again(calm, tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 14)  # step 2 is done, step 3 not begun
    foreign = folder / "rollouts" / "step-000003"
    shutil.copytree(calm / "rollouts" / "step-000003", foreign)
    for path in foreign.glob("*.jsonl"):  # 2 steps x 2 sources x 2 updates made version 8
        path.write_text(path.read_text().replace('"policy_version":8', '"policy_version":7'))
    assert '"policy_version":7' in (foreign / "small.jsonl").read_text()
    go_on(folder)
    assert "of policy versions [7], and the agent is at version 8" in (folder / "notes.txt").read_text()
    assert differing_files(calm, folder) == []


def test_a_log_of_other_problems_is_refused(calm, tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 14)
    shutil.copytree(calm / "rollouts" / "step-000001", folder / "rollouts" / "step-000003")
    with pytest.raises(CheckpointError, match=r"step-000003.*does not fit this run"):
        go_on(folder)


def test_an_unfinished_step_needs_its_rollouts(tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 7)
    (folder / "rollouts" / "step-000001" / "small.jsonl").unlink()
    with pytest.raises(CheckpointError, match="rollouts of small in step 1 are missing"):
        go_on(folder)


def test_rollouts_that_no_agent_has_learnt_from_may_be_sampled_again(calm, tmp_path):
    """As after an engine's responses were refused, which deletes them from the log."""
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 6)  # both have answered
    (folder / "rollouts" / "step-000001" / "small.jsonl").unlink()
    go_on(folder)
    assert differing_files(calm, folder) == []


def test_notes_of_an_unfinished_step_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "take_notes", lambda engine: [f"{engine.policy.name} notes"])
    whole, parts = (chaos_config(tmp_path / name, 1) for name in ("whole", "parts"))
    run_locally(whole)
    left_after(parts, 7)
    go_on(tmp_path / "parts")
    written = [(tmp_path / name / "notes.txt").read_text().splitlines() for name in ("whole", "parts")]
    assert len(written[0]) == 6  # of two agents in two evaluations and a step
    assert [line for line in written[1] if "resumed after" not in line] == written[0]


def test_the_weight_sync_of_an_unfinished_step_is_kept(tmp_path, monkeypatch):
    def sync(engine, proven=True):
        return SyncReport(engine.policy.policy_version, "files", 0.25, restarts=1)

    monkeypatch.setattr(TransformersEngine, "sync", sync)
    whole, parts = (chaos_config(tmp_path / name, 1) for name in ("whole", "parts"))
    run_locally(whole)
    left_after(parts, 7)
    go_on(tmp_path / "parts")
    assert '"logprob_gap": 0.25' in (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert differing_files(tmp_path / "whole", tmp_path / "parts") == []


def test_the_folder_is_locked_until_the_last_checkpoint_is_written(tmp_path, monkeypatch):
    config = chaos_config(tmp_path / "run", 1, checkpoint={"every": 1, "background": True})
    is_locked, write = [], CheckpointStore.write

    def slow_write(store, *arguments):
        closing.wait(30)
        time.sleep(0.1)
        is_locked.append(run._folder.is_open)
        write(store, *arguments)

    closing = threading.Event()
    monkeypatch.setattr(CheckpointStore, "write", slow_write)
    with LocalRun(config) as run:
        monkeypatch.setattr(run._task, "close", closing.set)
        run.train()
    assert is_locked == [True]


def test_a_run_is_closed_whatever_fails_while_it_closes(tmp_path, monkeypatch):
    closed = []

    class Watch(Observer):
        def on_end(self):
            closed.append("observer")

    def fail(engine):
        raise RuntimeError(f"the engine of {engine.policy.name} hangs")

    run = LocalRun(chaos_config(tmp_path / "run", 1), [Watch()])
    llama = run.trainer.executor.workers["llama"]
    monkeypatch.setattr(run._task, "close", lambda: closed.append("task"))
    monkeypatch.setattr(llama, "close", lambda: closed.append("engine of llama"))
    monkeypatch.setattr(TransformersEngine, "close", fail)
    with pytest.raises(RuntimeError, match="the engine of small hangs"):
        run.close()
    assert sorted(closed) == ["engine of llama", "observer", "task"]
    assert not run._folder.is_open


@pytest.mark.parametrize(("keep", "left"), [("all", [1, 2, 3]), (2, [2, 3]), ("none", [])])
def test_the_recipe_says_which_rollouts_are_kept(tmp_path, keep, left):
    config = chaos_config(tmp_path / "run", STEPS, keep_rollouts=keep)
    run_locally(config)
    assert RolloutLog(tmp_path / "run" / "rollouts").steps() == left


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint": {"every": 1, "background": True}},
        {"checkpoint": {"every": 2}},
        {"method": {"name": "gspo", "kl_coefficient": 0.1}},
        {"agent_defaults": {"lora": {"rank": 2}}},
        {"agent_defaults": {"precision": "bfloat16"}},
        {"method": {"name": "aligned", "clip_low": 0.2, "clip_high": 0.28}},
        {"method": {"name": "grpo"}, "learning": {"lr": 2e-4, "weight_decay": 0.1, "epochs": 2}},
    ],
    ids=["background", "every-2", "reference", "lora", "bfloat16", "trust", "grpo"],
)
def test_every_kind_of_state_is_kept(tmp_path, changes):
    whole, parts = (chaos_config(tmp_path / name, STEPS, **changes) for name in ("whole", "parts"))
    run_locally(whole)
    left_after(parts, 13)
    go_on(tmp_path / "parts")
    assert differing_files(tmp_path / "whole", tmp_path / "parts") == []


def test_adding_steps_equals_one_longer_run(calm, tmp_path):
    folder = tmp_path / "run"
    run_locally(chaos_config(folder, 2, evaluation={"problems": 0}))
    run_locally(chaos_config(tmp_path / "whole", 4, evaluation={"problems": 0}))
    go_on(folder, "steps=4")
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert yaml.safe_load((folder / "config.yaml").read_text())["steps"] == 4


def test_a_finished_run_says_so(calm, capsys):
    assert inspect_run(calm).finished_after == 3
    with pytest.raises(SystemExit) as ended:
        app(["resume", str(calm)])
    assert ended.value.code == 0
    assert f"{calm} is finished: it made 3 steps" in capsys.readouterr().out


def test_a_finished_run_without_a_checkpoint_is_not_changed(calm, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(calm, folder)
    shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"finished after 3 steps and has no checkpoint .*run/agents"):
        inspect_run(folder, ["steps=5"])
    assert inspect_run(folder).finished_after == 3
    with pytest.raises(SystemExit) as ended:
        app(["resume", str(folder)])
    assert ended.value.code == 0
    assert "it made 3 steps, and its agents are in" in (said := capsys.readouterr().out)
    assert "a new run from these agents" in said
    for steps, wrong in ((3, "no checkpoint to load"), (5, "no checkpoint to continue from")):
        with pytest.raises(ConfigError, match=wrong):
            resume_point_of(replace(load_config(folder / "config.yaml", []), output=str(folder), steps=steps))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_fewer_steps_than_were_made_are_refused_from_python_too(calm):
    config = replace(load_config(calm / "config.yaml", []), output=str(calm), steps=2)
    with pytest.raises(ConfigError, match=r"steps=2, but .* has made 3 steps already"):
        resume_point_of(config)


def test_without_a_checkpoint_a_run_starts_from_the_beginning(calm, tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 4)
    for one in (folder / "checkpoints").iterdir():
        for file in one.iterdir():
            file.unlink()
        one.rmdir()
    (folder / "metrics.jsonl").write_text('{"half": ')
    go_on(folder)
    assert "no checkpoint yet" in (folder / "notes.txt").read_text()
    assert differing_files(calm, folder) == []


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(calm, tmp_path):
    folder = tmp_path / "run"
    left_after(chaos_config(folder, STEPS), 17)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    weights = newest / "agent-llama.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    go_on(folder)
    notes = (folder / "notes.txt").read_text()
    assert f"{newest.name}/agent-llama.safetensors is damaged" in notes
    assert differing_files(calm, folder) == []


@pytest.fixture
def stopped(tmp_path) -> Path:
    left_after(chaos_config(tmp_path / "run", STEPS), 10)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("learning.lr=1e-3", r"learning\.lr was 0\.0002, now 0\.001"),
        ("seed=7", r"seed was 0, now 7"),
        ("agents.small.model=bundled:qwen-large", r"agents\.small\.model was 'bundled:qwen-small-a'"),
        ("rollout.temperature=0.5", r"rollout\.temperature was 1\.0, now 0\.5"),
        ("method.delta=0.3", r"method\.delta"),
        ("steps=0", r"steps=0, but .* has made 1 steps already"),
    ],
)
def test_changes_that_make_it_another_run_are_refused(stopped, change, said):
    with pytest.raises(ConfigError, match=said):
        inspect_run(stopped, [change])


def test_another_list_of_agents_is_refused(stopped):
    config = yaml.safe_load((stopped / "config.yaml").read_text())
    (stopped / "config.yaml").write_text(yaml.safe_dump({**config, "agents": config["agents"][:1]}))
    found = inspect_run(stopped)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        LocalRun(found.config, resumed=found.point)


def test_changes_of_rounding_are_noted(stopped):
    found = inspect_run(stopped, ["learning.micro_batch_tokens=64", "checkpoint.keep_last=5"])
    assert "learning.micro_batch_tokens changed" in found.point.notes[-1]
    assert "keep_last" not in found.point.notes[-1]
    assert found.config.learning.micro_batch_tokens == 64
    learner = found.point.state["agents"]["llama"]["learner"]
    assert learner["micro_batch_tokens"] == 64  # and not what the run had come down to
    assert inspect_run(stopped).point.state["agents"]["llama"]["learner"]["micro_batch_tokens"] == 4096


@pytest.mark.parametrize("change", ["learning.micro_batch_tokens=null", "device=cuda"])
def test_micro_batches_are_chosen_again_on_request_or_on_another_device(stopped, change):
    config = yaml.safe_load((stopped / "config.yaml").read_text())
    tokens = 64 if "null" in change else None  # as the run began
    config["learning"]["micro_batch_tokens"] = tokens
    (stopped / "config.yaml").write_text(yaml.safe_dump(config))
    learners = [agent["learner"] for agent in inspect_run(stopped, [change]).point.state["agents"].values()]
    assert [learner.keys() for learner in learners] == [{"bad_updates_in_a_row", "gradient_shares"}] * 2
    if "null" in change:
        found = inspect_run(stopped, [change])
        with LocalRun(found.config, resumed=found.point) as run:
            sizes = [
                one.learner.state_dict()["micro_batch_tokens"]
                for one in run.trainer.executor.workers.values()
            ]
        assert sizes == [4096, 4096]  # on a CPU


def test_other_problems_are_refused(stopped):
    found = inspect_run(stopped)
    other = replace(found.point, data="0" * 64)
    with pytest.raises(CheckpointError, match="problems differ from those"):
        LocalRun(found.config, resumed=other)


def test_missing_lines_are_an_error(stopped):
    path = stopped / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    found = inspect_run(stopped)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is \d+ bytes long, but the checkpoint recorded"):
        LocalRun(found.config, resumed=found.point)


def test_a_link_out_of_the_folder_is_refused(stopped, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("keep\n")
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl leads out of"):
        inspect_run(stopped)
    assert secret.read_text() == "keep\n"


@pytest.mark.parametrize("content", ["{}", "[", '{"schema": 99, "state": "running"}', "\0", '"x"'])
def test_a_status_of_another_version_is_refused(stopped, content):
    (stopped / "status.json").write_text(content)
    with pytest.raises(ConfigError, match=r"status\.json"):
        inspect_run(stopped)


def test_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        inspect_run(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        inspect_run(tmp_path)


def test_a_run_is_written_by_one_process_at_a_time(stopped):
    found = inspect_run(stopped)
    said = f"process {os.getpid()} is writing to"
    with LocalRun(found.config, resumed=found.point), pytest.raises(ConfigError, match=said):
        LocalRun(found.config, resumed=found.point)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(calm, tmp_path, number):
    """Through the command, in a process of its own."""
    folder = tmp_path / "run"
    config = tmp_path / "recipe.yaml"
    config.write_text((calm / "config.yaml").read_text())
    command = [sys.executable, "-m", "hacrl", "train", str(config), f"output={folder}", "steps=2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in process.stdout:
        if "step 2/" in line:
            process.send_signal(number)
            break
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"hacrl resume {folder}" in said
    assert status(folder) == "stopped"
    done = json.loads((folder / "status.json").read_text())["steps_done"]
    run_locally(chaos_config(tmp_path / "whole", done + 1))
    go_on(folder, f"steps={done + 1}")
    assert differing_files(tmp_path / "whole", folder) == []
