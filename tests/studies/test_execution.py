"""A study's runs in processes: continued after a kill, with one evaluation before training for each seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from hacrl.config.load import build_config
from hacrl.errors import ConfigError, TaskError
from hacrl.report.runs import find_runs
from hacrl.report.study_tables import find_study, study_tables
from hacrl.runs.results import RunResult
from hacrl.runs.run import LocalRun, run_locally
from hacrl.studies.benchmarks import StudyBenchmarks
from hacrl.studies.capacity import FixedCapacity
from hacrl.studies.compare import PlannedRun, plan_runs
from hacrl.studies.execution import Progress, StudyObserver, progress_of, run_study, start_key
from hacrl.studies.study import RunKey, make_study
from hacrl.studies.variants import variant_recipe
from tests.support.tiny import save_agents

TWO = FixedCapacity(2)


def run_here(runs: Sequence[PlannedRun], **options: Any) -> dict[RunKey, RunResult]:
    """Make the runs one after the other in a thread: a process takes seconds to import torch."""
    return run_study(runs, make_pool=lambda _: ThreadPoolExecutor(1), **options)


class Events(StudyObserver):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.notes: list[str] = []

    def on_done(self, run: PlannedRun, result: RunResult) -> None:
        self.done.append(run.key)

    def on_note(self, note: str) -> None:
        self.notes.append(note)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> dict[str, Any]:
    models = save_agents(tmp_path_factory.mktemp("models"))
    return {
        "agents": [{"name": name, "model": folder} for name, folder in models.items()],
        "steps": 1,
        "device": "cpu",
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
        "evaluation": {"problems": 2, "samples_per_problem": 1},
    }


def test_finished_runs_are_kept_and_others_made(recipe, tmp_path):
    events = Events()
    runs = plan_runs(recipe, ["gspo", "hacpo", "gspo"], 1, tmp_path / "study")
    first = run_here(runs[:1], observer=events)
    stamp = (runs[0].folder / "metrics.jsonl").stat().st_mtime_ns
    both = run_here(runs, observer=events)
    assert events.done == [("gspo", 0), ("gspo", 0), ("hacpo", 0)]
    assert both["gspo", 0] == first["gspo", 0]
    assert (runs[0].folder / "metrics.jsonl").stat().st_mtime_ns == stamp  # not run again
    changed = plan_runs({**recipe, "steps": 2}, ["gspo"], 1, tmp_path / "study")
    with pytest.raises(ConfigError, match=r"other settings \(steps\); use another --output"):
        run_here(changed)
    path = runs[0].folder / "config.yaml"
    before = path.read_text()
    path.write_text(before.replace("learning:\n", "learning:\n  micro_batch_tokens: 4096\n"))
    assert path.read_text() != before  # as it was when that was the default, or among several jobs
    assert run_here(runs[:1]) == first
    path.write_text("agents: 7\n")
    with pytest.raises(
        ConfigError, match=r"(?s)other settings \(.*agents: must be a list, not 7.*\); use another"
    ):
        run_here(runs[:1])
    path.write_text(before)
    assert (runs[0].folder / "metrics.jsonl").stat().st_mtime_ns == stamp
    again = run_here(changed, capacity=TWO, overwrite=True)
    assert len(again["gspo", 0].rewards["char"]) == 2
    assert "micro_batch_tokens: 4096" in path.read_text()  # two at a time share what there is


def notes_of(run: PlannedRun) -> str:
    return (run.folder / "notes.txt").read_text() if (run.folder / "notes.txt").exists() else ""


def test_the_runs_of_a_seed_share_the_evaluation_before_training(recipe, tmp_path):
    runs = plan_runs(recipe, ["gspo", "hacpo@lr=1e-4"], 1, tmp_path / "shared")
    results = run_study(runs, TWO)  # in two processes: the second run waits for the first one's evaluation
    first, other = runs
    assert results[other.key].accuracies[0] == results[first.key].accuracies[0]
    assert f"accuracies before training are those of {first.folder}" in notes_of(other)
    assert "before training" not in notes_of(first)
    # exactly what the run would have measured and learnt by itself
    alone = run_locally(replace(other.config, output=str(tmp_path / "alone")))
    assert alone.accuracies == results[other.key].accuracies
    assert (alone.folder / "metrics.jsonl").read_text() == (other.folder / "metrics.jsonl").read_text()


def test_a_run_that_ends_between_two_looks_is_a_start_for_others(recipe, tmp_path):
    runs = plan_runs(recipe, ["gspo", "hacpo"], 2, tmp_path)
    run_here(runs)
    shared = [run.key for run in runs if "before training" in notes_of(run)]
    assert shared == [("hacpo", 0), ("hacpo", 1)]


def test_what_changes_the_first_evaluation_is_not_shared(recipe):
    base = build_config({**variant_recipe(recipe, "gspo"), "output": "elsewhere"})
    same = ("naive", "gspo_x2", "gspo@lr=1e-3", "gspo@steps=7", "gspo@agents.char.lr=1e-3")
    other = ("gspo@evaluation.problems=3", "gspo@rollout.max_new_tokens=5", "gspo@rollout.max_batch=1")
    for variants, expected in ((same, True), (other, False)):
        for variant in variants:
            config = build_config({**variant_recipe(recipe, variant), "output": "x"})
            assert (start_key(config) == start_key(base)) is expected, variant
    assert start_key(replace(base, seed=3)) != start_key(base)


def test_an_interrupted_run_continues_from_its_checkpoint(recipe, tmp_path):
    long = {**recipe, "steps": 4, "checkpoint": {"every": 1, "background": False}}
    (whole,) = plan_runs(long, ["hacpo"], 1, tmp_path / "whole")
    (killed,) = plan_runs(long, ["hacpo"], 1, tmp_path / "killed")
    expected = run_here([whole])
    with LocalRun(killed.config) as run:  # no status "stopped", no saved agents: as after a kill
        run.trainer.evaluate(0)
        for step in (1, 2):
            run.trainer.step(step)
            run.trainer.after_step()
    assert progress_of(killed) == Progress("continues", 2)
    events = Events()
    results = run_here([killed], observer=events)
    assert events.notes == ["hacpo, seed 0, continues after step 2"]
    assert results[killed.key].accuracies == expected[whole.key].accuracies
    metrics = [(run.folder / "metrics.jsonl").read_text() for run in (whole, killed)]
    assert metrics[0] == metrics[1]
    assert "resumed after step 2" in notes_of(killed)
    assert progress_of(killed) == Progress("finished")


def test_an_interrupted_run_without_a_checkpoint_starts_again(recipe, tmp_path):
    (run,) = plan_runs(recipe, ["gspo"], 1, tmp_path)
    assert progress_of(run) == Progress("new")
    expected = run_here([run])
    shutil.rmtree(run.folder / "agents")
    events = Events()
    again = run_here([run], observer=events)
    assert again[run.key].accuracies == expected[run.key].accuracies
    note = "gspo, seed 0, starts again: it was interrupted and has no checkpoint (checkpoint.every)"
    assert events.notes == [note]


def test_runs_are_evaluated_on_benchmarks_and_their_agents_before_once(recipe, tmp_path):
    on = StudyBenchmarks(("task",), samples=2, limit=2)
    runs = plan_runs(recipe, ["gspo", "hacpo"], 1, tmp_path / "study")
    run_here(runs[:1])
    results = run_here(runs, benchmarks=on)  # a run that is finished is evaluated, too
    scores = {run.key: on.scores(run.folder) for run in runs}
    stages = {key: {(one.stage, one.measure) for one in found} for key, found in scores.items()}
    after = {("after", "avg@2"), ("after", "pass@2"), ("after", "greedy")}
    before = {("before", measure) for _, measure in after}
    assert stages == {key: after | before if key == ("gspo", 0) else after for key in stages}
    study = make_study(results, "gspo", scores)
    assert [measure.name for measure in study.measures[1:]] == ["task avg@2", "task pass@2", "task greedy"]
    stamp = (runs[0].folder / "evaluations/task-avg-2-limit-2/responses.jsonl").read_text()
    run_here(runs, benchmarks=on)
    assert (runs[0].folder / "evaluations/task-avg-2-limit-2/responses.jsonl").read_text() == stamp
    (tmp_path / "study" / "study.json").write_text(json.dumps(study.as_dict()))
    found = find_study(find_runs([tmp_path / "study"]))
    assert found is not None
    tables = {table.name: table for table in study_tables(found)}
    assert tables["study-benchmarks"].columns == ("agent", "method", "task", "task, greedy")
    assert [row[:2] for row in tables["study-benchmarks"].rows[:3]] == [
        ("char", "before"),
        ("char", "gspo"),
        ("char", "hacpo"),
    ]


def test_benchmarks_are_checked_before_the_runs(tmp_path):
    with pytest.raises(TaskError, match="gsm9k"):
        StudyBenchmarks(("gsm9k",)).check()
    StudyBenchmarks(("task,arithmetic",)).check()
