"""``hacrl eval`` of a study: every run's agents, with method and seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest

from hacrl.config.schema import BenchmarkSettings
from hacrl.errors import ConfigError, ModelError
from hacrl.evaluation.plan import EvaluationRequest
from hacrl.evaluation.run import evaluate_targets
from hacrl.evaluation.tables import result_tables
from hacrl.evaluation.targets import default_output, resolve_targets
from hacrl.runs.run import run_locally
from hacrl.studies.compare import plan_runs

AGENTS = {"small": "bundled:qwen-small-a", "llama": "bundled:llama-pairs"}
RECIPE = {
    "agents": [{"name": name, "model": model} for name, model in AGENTS.items()],
    "steps": 1,
    "seed": 3,
    "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 4, "max_new_tokens": 12},
    "learning": {"lr": 1e-2},
    "evaluation": {"problems": 6, "samples_per_problem": 2},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "compare-mine"
    for run in plan_runs(dict(RECIPE), ["hacpo", "gspo@agents.small.lr=1e-5"], 2, folder):
        run_locally(run.config)
    return folder


def test_a_study_is_evaluated_with_method_and_seed_in_the_labels(study):
    settings = BenchmarkSettings(seed=3, limit=6)
    request = EvaluationRequest(targets=(str(study),), before=True, settings=settings, device="cpu")
    results, folder = evaluate_targets(request)
    assert folder == study / "evaluations" / "task"
    gspo = "gspo@agents.small.lr=1e-5"
    runs = [(variant, seed) for variant in (gspo, "hacpo") for seed in (3, 4)]
    trained = [(variant, seed, agent) for variant, seed in runs for agent in AGENTS]
    expected = [f"{variant} seed {seed}: {agent}" for variant, seed, agent in trained]
    assert [pair.label for pair in results.pairs] == ["small (before)", "llama (before)", *expected]
    assert [(pair.variant, pair.run_seed, pair.agent) for pair in results.pairs[2:]] == trained
    assert [(pair.variant, pair.run_seed) for pair in results.pairs[:2]] == [(None, None)] * 2
    found = {pair.label: pair.score.average.mean for pair in results.pairs}
    for variant, agent in ((gspo, "small"), ("hacpo", "llama")):  # as each run of seed 3 measured itself
        logged = (study / variant / "seed-3" / "evaluations.jsonl").read_text().splitlines()
        own = [json.loads(line)["agents"][agent]["mean"] for line in logged]
        assert [found[f"{agent} (before)"], found[f"{variant} seed 3: {agent}"]] == own
    changes = {change.label: change.change.mean for change in results.changes()}
    assert changes.keys() == set(expected)
    for label in expected:
        assert changes[label] == pytest.approx(found[label] - found[f"{label.rpartition(' ')[2]} (before)"])
    table = result_tables(results)[-1]
    assert (table.title, table.headings) == (
        "task: mean ± standard deviation over 2 seeds",
        ("method", "small", "llama"),
    )
    values = [found[f"hacpo seed {seed}: llama"] for seed in (3, 4)]
    assert table.rows[1][2] == f"{fmean(values):.3f} ± {stdev(values):.3f}"
    assert table.rows[1][0] == "hacpo"
    assert table.title in (folder / "results.md").read_text()


def test_seeds_are_in_the_order_of_numbers(study, tmp_path):
    folder = tmp_path / "study"
    for seed in (10, 2):
        shutil.copytree(study / "hacpo" / "seed-3", folder / "hacpo" / f"seed-{seed}")
    (folder / "study.md").write_text("")
    assert [target.label for target in resolve_targets([str(folder)])] == [
        f"hacpo seed {seed}: {agent}" for seed in (2, 10) for agent in AGENTS
    ]
    assert default_output(resolve_targets([str(folder)]), ["math500"]) == folder / "evaluations" / "math500"


def test_what_cannot_be_evaluated_is_named(study, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(study / "hacpo", folder / "hacpo")
    path = folder / "hacpo" / "seed-4" / "config.yaml"
    path.write_text(path.read_text().replace("bundled:qwen-small-a", "bundled:qwen-large"))
    with pytest.raises(ConfigError, match="agent 'small' does not begin as the same model in every run"):
        resolve_targets([str(folder)], before=True)
    shutil.rmtree(folder / "hacpo" / "seed-3" / "agents")
    with pytest.raises(ModelError, match="seed-3 finish first"):
        resolve_targets([str(folder)])
