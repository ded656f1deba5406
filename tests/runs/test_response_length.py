"""Defaults of the response's length by task, and the warning about a limit that cuts the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl.cli.main import app
from hacrl.config.load import build_config, load_config
from hacrl.runs.dry_run import dry_run
from hacrl.runs.run import run_locally

# Nine solutions of 100 characters and one of 200, "#### 7" included; characters are the agent's tokens.
SOLUTIONS = ["1" * 93 + "\n#### 7"] * 9 + ["2" * 193 + "\n#### 7"]


def recipe(tmp_path: Path, **rollout) -> dict:
    rows = [{"question": f"{i}+{i}", "answer": solution} for i, solution in enumerate(SOLUTIONS)]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    options = {"train": str(data), "test": str(data), "prompt": "{problem}:", "test_share": None}
    del options["test"], options["test_share"]
    return {
        "agents": [{"name": "ada", "model": "bundled:qwen-small-a"}],
        "output": str(tmp_path / "run"),
        "method": "gspo",
        "steps": 1,
        "task": {"name": "boxed", "options": {**options, "test_share": 0}},
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, **rollout},
        "evaluation": {"problems": 0},
    }


@pytest.mark.parametrize(
    ("task", "tokens"),
    [("gsm8k", 512), ("math", 1024), ("gym:chain_sum", 256), ("arithmetic", 64), ("mine.py:Task", 64)],
)
def test_the_default_suits_the_task(task, tokens) -> None:
    agents = [{"name": "ada", "model": "x"}]
    config = build_config({"agents": agents, "output": "x", "task": task})
    assert config.rollout.max_new_tokens == tokens
    own = {"agents": agents, "output": "x", "task": {"name": task}, "rollout": {"max_new_tokens": 7}}
    assert build_config(own).rollout.max_new_tokens == 7
    assert "max_new_tokens" not in own["task"]


def test_a_saved_config_keeps_its_own(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("agents: [{name: ada, model: x}]\ntask: gsm8k\n", encoding="utf-8")
    assert load_config(file).rollout.max_new_tokens == 512
    assert load_config(file, ["rollout.max_new_tokens=64"]).rollout.max_new_tokens == 64


def test_a_limit_below_the_solutions_is_a_warning(tmp_path: Path) -> None:
    plan = dry_run(build_config(recipe(tmp_path, max_new_tokens=64)))
    (warning,) = plan.warnings
    # twice the 95th percentile, 2 * 100 = 200, rounded up to a power of two
    assert warning == (
        "rollout.max_new_tokens=64 is too short: 100% of the task's solutions (10 measured) are longer in "
        "the tokens of agent ada; the median is 100 tokens and the longest 200. A response that is cut has "
        "no answer, so it earns nothing. Set rollout.max_new_tokens=256, or leave it out for the task's "
        "default"
    )
    # one of ten is longer than 100: a tenth, which may be
    assert dry_run(build_config(recipe(tmp_path, max_new_tokens=100))).warnings == ()


def test_the_dry_run_does_not_call_it_ready(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe(tmp_path, max_new_tokens=64)), encoding="utf-8")
    shown = CliRunner().invoke(app, ["train", str(file), "--dry-run"]).output
    assert "WARNING: rollout.max_new_tokens=64 is too short" in shown
    assert shown.strip().endswith("ready, except for what is marked WARNING above")
    assert "max_new_tokens: 64" in shown


def test_a_run_notes_it(tmp_path: Path) -> None:
    folder = run_locally(build_config(recipe(tmp_path, max_new_tokens=8))).folder
    notes = (folder / "notes.txt").read_text("utf-8").splitlines()
    assert [note for note in notes if note.startswith("step 0: rollout.max_new_tokens=8 is too short")]


def test_gold_answers_are_measured_without_solutions(tmp_path: Path) -> None:
    data = recipe(tmp_path, max_new_tokens=2)
    rows = [{"problem": f"{i}+{i}", "answer": "12345"} for i in range(10)]
    Path(data["task"]["options"]["train"]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (warning,) = dry_run(build_config(data)).warnings
    assert warning.startswith("rollout.max_new_tokens=2 is too short: 100% of the task's gold answers")


@pytest.mark.parametrize(("column", "measured"), [("solution", "solutions"), ("answer", "gold answers")])
def test_half_a_character_in_an_answer_does_not_end_the_run(
    column: str, measured: str, tmp_path: Path
) -> None:
    r"""JSON files can hold one, as ``\ud83d``; tokenizers cannot read it."""
    data = recipe(tmp_path, max_new_tokens=4)
    rows = [{"problem": f"{i}+{i}", "answer": "5", column: "12345"} for i in range(10)]
    rows[3][column] = "1234\ud83d"
    Path(data["task"]["options"]["train"]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    folder = run_locally(build_config(data)).folder
    (note,) = [note for note in (folder / "notes.txt").read_text("utf-8").splitlines() if "too short" in note]
    assert f"100% of the task's {measured} (9 measured)" in note
