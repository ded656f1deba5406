"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hacrl.cli.main import app
from hacrl.cli.train import run_training
from tests.support.tiny import save_agents


def hacrl(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "hacrl.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Two random tiny agents and a run of a second."""
    folder = tmp_path_factory.mktemp("cli")
    agents = "\n".join(f"  - {{name: {n}, model: {m}}}" for n, m in save_agents(folder / "models").items())
    path = folder / "tiny.yaml"
    path.write_text(
        f"agents:\n{agents}\nsteps: 2\n"
        "rollout: {prompts_per_step: 2, rollouts_per_prompt: 2, max_new_tokens: 4}\n"
        "evaluation: {problems: 3, samples_per_problem: 1}\n"
    )
    return path


def test_train_prints_progress_results_and_folder(recipe):
    done = hacrl("train", recipe.name, "output=out", cwd=recipe.parent)
    assert done.returncode == 0, done.stderr
    for words in ("HACPO: step 1/2  reward char", "after 2 steps", "Run folder: out"):
        assert words in done.stdout
    assert (recipe.parent / "out" / "agents" / "pair" / "model.safetensors").is_file()
    again = hacrl("train", recipe.name, "output=out", cwd=recipe.parent)
    assert again.returncode == 2
    assert "out exists already; " in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml does not exist"),
        (["tiny.yaml", "stpes=3"], "did you mean 'steps'?"),
        (["tiny.yaml", "agents.char.model=./gone"], "agents.char.model: folder ./gone does not exist"),
        (["tiny.yaml", "steps"], "key=value"),
    ],
)
def test_a_mistake_is_one_message_without_a_traceback(recipe, arguments, words):
    failed = hacrl("train", *arguments, cwd=recipe.parent)
    assert failed.returncode == 2
    assert words in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (recipe.parent / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "size", "--lr", "3e-5"], "without dashes: lr=3e-5"),
        (["train", "size", "--learning-rate=1e-5", "--dry-run"], "without dashes: learning.lr=1e-5"),
        (["resume", "runs/size", "--steps", "--x"], "without dashes: steps=..."),
        (["compare", "size", "--num_generations", "4"], "without dashes: rollout.rollouts_per_prompt=4"),
        (["train", "size", "--dry_run"], "Possible options: --dry-run"),
    ],
)
def test_a_key_given_as_an_option_is_answered_with_what_to_write(arguments, words):
    failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 2
    assert words in failed.output


def test_dry_run_prints_the_whole_config_and_writes_nothing(recipe):
    shown = hacrl("train", recipe.name, "--dry-run", "lr=3e-5", cwd=recipe.parent)
    assert shown.returncode == 0, shown.stderr
    assert "lr: 3.0e-05" in shown.stdout
    assert "window: 5" in shown.stdout  # a default nobody wrote down
    assert not (recipe.parent / "runs").exists()


def test_without_arguments_the_help_is_printed(tmp_path):
    shown = hacrl("--help", cwd=tmp_path)
    assert shown.returncode == 0
    for command in ("demo", "train", "compare", "agents"):
        assert command in shown.stdout
    assert hacrl("--version", cwd=tmp_path).stdout == "hacrl 0.1.0\n"


def test_agents_lists_the_bundled_ones(tmp_path):
    shown = hacrl("agents", cwd=tmp_path).stdout
    qwens = ("qwen-small-a", "qwen-small-b", "qwen-large", "qwen-direct", "qwen-worked")
    for name in (*qwens, "llama-pairs"):
        assert f"bundled:{name}" in shown
    assert "LlamaForCausalLM" in shown


def test_demo_prints_one_json_object_last_and_keeps_it(tmp_path):
    """A demo of one step: everything is run and written, though little is learnt."""
    done = hacrl("demo", "--steps", "1", "--json", "--output", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["folder"] == "d"
    assert list(summary["agents"]) == ["small", "large", "llama"]
    for agent in summary["agents"].values():
        # 16 prompts x 8 responses; GSPO 2 updates, HACPO 2 for each of the 3 sources
        assert agent["gspo"]["rollouts"] == agent["hacpo"]["rollouts"] == 128
        assert (agent["gspo"]["updates"], agent["hacpo"]["updates"]) == (2, 6)
        assert 0.2 < agent["before"]["mean"] < 0.7
    assert (tmp_path / "d" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "d" / "comparison.json").read_text())
    assert saved == summary
    assert hacrl("demo", "--steps", "0", cwd=tmp_path).returncode == 2


def test_an_earlier_demo_keeps_its_folder(tmp_path):
    from hacrl.cli.demo import unused_folder

    assert unused_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert unused_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_compare_help_names_every_variant(tmp_path):
    from hacrl.studies.variants import VARIANTS

    shown = "".join(hacrl("compare", "--help", cwd=tmp_path).stdout.split())  # wherever lines are broken
    for variant in VARIANTS:
        if not variant.startswith("hacpo_alpha"):  # named as hacpo_alpha_0/2/3
            assert variant in shown


def test_an_interruption_before_the_run_is_reported(recipe, tmp_path, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hacrl.runs.run.LocalRun", interrupted)
    with pytest.raises(typer.Exit) as ended:
        run_training(recipe, ["output=out"], overwrite=False, dry_run=False)
    assert ended.value.exit_code == 130
    assert "before the first step" in capsys.readouterr().err
