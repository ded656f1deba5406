"""The files of a run, and the folders that a run refuses to write to."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hacrl.config.load import build_config, load_config
from hacrl.errors import CheckpointError, ConfigError, ModelError, TrainingError
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.folder import check_output
from hacrl.runs.results import read_result
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from hacrl.types import Problem
from tests.support.sevens import SevensTask
from tests.support.tiny import save_agents


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return save_agents(tmp_path_factory.mktemp("models"))


def small_config(models: dict[str, str], output: Path, **changes):
    data = {
        "agents": [{"name": name, "model": folder} for name, folder in models.items()],
        "output": str(output),
        "steps": 2,
        "threads": 1,
        "logged_rollouts": 2,
        "rollout": {"prompts_per_step": 3, "rollouts_per_prompt": 2, "max_new_tokens": 8},
        "learning": {"lr": 1e-3},
        "evaluation": {"problems": 5, "samples_per_problem": 2},
        **changes,
    }
    return build_config(data)


@pytest.fixture(scope="module")
def finished(models, tmp_path_factory):
    config = small_config(models, tmp_path_factory.mktemp("runs") / "first")
    return config, run_locally(config)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_folder_holds_config_metrics_evaluations_and_agents(finished):
    config, result = finished
    assert load_config(result.folder / "config.yaml") == config
    assert [line["step"] for line in lines(result.folder / "metrics.jsonl")] == [1, 2]
    assert [line["step"] for line in lines(result.folder / "evaluations.jsonl")] == [0, 2]
    logged = list(RolloutLog(result.folder / "rollouts").read())
    kept = [(row["step"], row["agent"]) for row in logged]  # 3 prompts x 2 responses each
    assert kept == [(1, "char")] * 6 + [(1, "pair")] * 6 + [(2, "char")] * 6 + [(2, "pair")] * 6
    assert [row["sample"] for row in logged[:6]] == [0, 1] * 3
    # 2 steps x 3 prompts x 2 responses; 2 steps x 2 sources x 2 updates
    assert result.rollouts == {"char": 12, "pair": 12}
    assert result.updates == {"char": 8, "pair": 8}


def test_phases_of_both_agents_are_timed(finished):
    _, result = finished
    for line in lines(result.folder / "timings.jsonl"):
        expected = {
            f"{phase}/{agent}" for phase in ("rollout", "verify", "learn") for agent in ("char", "pair")
        }
        assert expected <= set(line)


def test_a_surrogate_in_an_id_does_not_end_the_run(models, tmp_path):
    r"""JSON files can hold one, as ``\ud83d``; UTF-8 cannot."""
    task = SevensTask()
    task.train = [Problem(f"\ud83d{i}", f"{i}+1:", "7") for i in range(4)]
    config = build_config(
        {
            "agents": [{"name": "char", "model": models["char"]}],
            "output": str(tmp_path / "run"),
            "steps": 1,
            "method": "gspo",
            "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
            "evaluation": {"problems": 0},
        }
    )
    run_locally(config, task=task)
    logged = list(RolloutLog(tmp_path / "run" / "rollouts").read())
    assert {row["problem"][0] for row in logged} == {"\ud83d"}


def test_a_result_can_be_read_from_the_folder(finished):
    _, result = finished
    assert read_result(result.folder) == result


def test_saved_agents_load_alone_with_the_same_numbers(finished, models):
    """A plain transformers process, without hacrl, computes the log-probabilities of the trained agent."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, result = finished
    code = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "torch.set_num_threads(1)\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "t = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = t('(23+14)*2:', return_tensors='pt').input_ids\n"
        "print(json.dumps(m(ids).logits.log_softmax(-1)[0, -1].tolist()))"
    )
    for name, original in models.items():
        folder = result.folder / "agents" / name
        out = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
        ).stdout
        here = AutoModelForCausalLM.from_pretrained(folder)
        ids = AutoTokenizer.from_pretrained(original)("(23+14)*2:", return_tensors="pt").input_ids
        expected = here(ids).logits.log_softmax(-1)[0, -1]
        assert torch.equal(torch.tensor(json.loads(out.splitlines()[-1])), expected)


def test_an_earlier_run_is_kept_without_overwrite(models, tmp_path):
    config = small_config(models, tmp_path / "run", steps=1)
    run_locally(config)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="exists already; "):
        run_locally(config)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    run_locally(config, overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before  # the same run again, to the byte


def test_overwrite_does_not_touch_a_running_run(models, tmp_path):
    config = small_config(models, tmp_path / "run")
    with LocalRun(config) as live:
        before = {path: path.read_bytes() for path in live.result.folder.rglob("*") if path.is_file()}
        with pytest.raises(ConfigError, match=f"process {os.getpid()} is writing to"):
            run_locally(config, overwrite=True)
        assert {path: path.read_bytes() for path in before} == before
        live.train()
    run_locally(config, overwrite=True)


class StatusReader(Observer):
    """Reads status.json when each step begins to learn."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "status.json"
        self.seen: list[tuple[int, str, int]] = []

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (phase, agent) == ("learn", "char"):
            status = json.loads(self.path.read_text())
            self.seen.append((step, status["state"], status["steps_done"]))


def test_the_status_of_a_running_run_names_its_finished_steps(models, tmp_path):
    config = replace(small_config(models, tmp_path / "run"), steps=3)
    watch = StatusReader(tmp_path / "run")
    run_locally(config, [watch])
    assert watch.seen == [(1, "running", 0), (2, "running", 1), (3, "running", 2)]


def test_overwrite_never_deletes_a_folder_with_other_files(models, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    (precious / "config.yaml").write_text("x: 1")  # looks like a run at first sight
    with pytest.raises(ConfigError, match=r"holds files that no run wrote \(thesis\.txt"):
        run_locally(small_config(models, precious), overwrite=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda:63"}, ["device", "cuda:63"]),
        ({"device": "toaster"}, ["toaster", "not a device"]),
        ({"device": "meta"}, ["meta", "not a device"]),
        ({"task": {"name": "arithmetic", "options": {"start": ["a", "b"]}}}, ["start", "whole numbers"]),
        ({"task": {"name": "arithmetic", "options": {"term": [0, 10**8]}}}, ["term", "too many problems"]),
        ({"task": {"name": "arithmetic", "options": {"prompt": "?"}}}, ["prompt", "{problem}"]),
        ({"task": {"name": "chess"}}, ["task.name", "chess", "arithmetic"]),
        ({"task": {"name": "arithmetic", "options": {"largst": 3}}}, ["task.options.largst", "'largest'"]),
        ({"task": {"name": "arithmetic", "options": {"start": 3}}}, ["task.options", "start"]),
        ({"rollout": {"prompts_per_step": 10**6}}, ["prompts_per_step=1000000", "training problems"]),
        ({"evaluation": {"problems": 10**6}}, ["evaluation.problems=1000000", "holds out only"]),
        ({"agents": [{"name": "x", "model": "./not/here"}]}, ["agents.x.model", "./not/here"]),
        ({"agents": [{"name": "x", "model": "bundled:gpt"}]}, ["agents.x.model", "'gpt'", "qwen-large"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(models, tmp_path, changes, words):
    config = small_config(models, tmp_path / "run", **changes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - which of our errors it is does not matter
        run_locally(config)
    for word in words:
        assert word in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_unwritable_output_is_named(models, tmp_path):
    with pytest.raises(ConfigError, match="output must name a folder"):
        run_locally(small_config(models, tmp_path / "a\0b"))
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match=r"output: cannot write to .*file is a file; choose another"):
            check_output(small_config(models, place), overwrite=True)


def test_a_failed_load_does_not_change_an_earlier_run(models, tmp_path):
    run_locally(small_config(models, tmp_path / "run", steps=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    broken = tmp_path / "broken"
    shutil.copytree(models["char"], broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    config = small_config({**models, "char": str(broken)}, tmp_path / "run", steps=1)
    with pytest.raises(ModelError, match="agent 'char': cannot load model"):
        run_locally(config, overwrite=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "run" / "agents" / "pair" / "model.safetensors").is_file()
    with pytest.raises(ModelError):
        run_locally(small_config({"char": str(broken)}, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("left", [".lock", "engines/char/engine.log", "stalls.txt", "tensorboard/events", ""])
def test_what_a_failed_start_leaves_is_no_obstacle(models, tmp_path, left):
    """An engine writes its log before the run's folder has a config; then its start may fail."""
    folder = tmp_path / "run"
    folder.mkdir()
    if left:
        (folder / left).parent.mkdir(parents=True, exist_ok=True)
        (folder / left).write_text("")
    run_locally(small_config(models, folder, steps=0))
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert left in (".lock", "") or not (folder / left).exists()


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_vanishes_ends_the_run_with_the_reason(models, tmp_path, moved):
    """Otherwise the run would go on, and say at the end that everything is saved."""

    class Vanish(Observer):
        def on_phase(self, step: int, phase: Phase, agent: str) -> None:
            if (step, phase, agent) == (2, "learn", "char"):
                (tmp_path / "run").rename(tmp_path / "away")
                if moved:
                    shutil.copytree(tmp_path / "away", tmp_path / "run")

    with pytest.raises(
        CheckpointError, match="run was deleted, moved or replaced while this run was writing"
    ):
        run_locally(replace(small_config(models, tmp_path / "run"), steps=4), [Vanish()])
    assert len(lines(tmp_path / "away" / "metrics.jsonl")) == 1


def test_unfinished_files_of_a_killed_process_can_be_overwritten(models, tmp_path):
    config = small_config(models, tmp_path / "run", steps=0)
    run_locally(config)
    (tmp_path / "run" / ".status.json.new").write_text("")
    run_locally(config, overwrite=True)
    assert not (tmp_path / "run" / ".status.json.new").exists()


def test_an_output_that_is_a_link_to_nothing_is_named(models, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"output: .*link is a link to .*gone, which does not exist"):
        check_output(small_config(models, tmp_path / "link"), overwrite=False)
    (tmp_path / "gone").mkdir()
    check_output(small_config(models, tmp_path / "link"), overwrite=False)


def test_rollouts_without_a_config_are_not_deleted(models, tmp_path):
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"exists already; choose another output=FOLDER, or replace"):
        run_locally(small_config(models, folder, steps=0))


class Refuses(Observer):
    """Fails at the run's first note, after the folder was made: as a tracker does that cannot start."""

    def on_note(self, step: int, note: str) -> None:
        raise ConfigError("trackers: x could not start")


def test_a_run_that_fails_as_it_opens_says_so_and_can_be_resumed(models, tmp_path):
    config = small_config(models, tmp_path / "run", steps=1, learning={"warmup": 5})  # which is noted
    with pytest.raises(ConfigError, match="x could not start") as caught:
        run_locally(config, [Refuses()])
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "ConfigError: trackers: x could not start")
    found = inspect_run(tmp_path / "run")  # while the exception still refers to the failed run
    with LocalRun(found.config, resumed=found.point) as run:
        run.train()
    del caught


def test_the_number_of_threads_is_in_the_config(models, tmp_path):
    """Other numbers of threads round sums differently, so repeating a run needs the number."""
    result = run_locally(small_config(models, tmp_path / "run", steps=0, threads=None))
    assert load_config(result.folder / "config.yaml").threads == torch.get_num_threads()


def test_a_model_with_nan_logits_is_named(models, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["char"])
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    shutil.copytree(models["char"], tmp_path / "nan")
    model.save_pretrained(tmp_path / "nan")
    config = small_config({"nan": str(tmp_path / "nan")}, tmp_path / "run")
    with pytest.raises(TrainingError, match="agent 'nan' gives logits that are not finite"):
        run_locally(config)
