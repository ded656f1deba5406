"""Tasks by name, and what reading a config must not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hacrl.config.load import build_config, config_to_yaml
from hacrl.config.schema import TaskSettings, VerifierSettings
from hacrl.errors import ConfigError, TaskError
from hacrl.tasks.registry import TASKS, make_task
from tests.tasks.helpers import build, refusal

AGENTS = [{"name": "ada", "model": "bundled:qwen-small-a"}]


def test_names():
    bundled = ["calculator", "python", "dungeon", "sqlite", "written_calculator", "verifiers"]
    assert list(TASKS) == ["arithmetic", "boxed", "math", "gsm8k", "reward", "environment", *bundled]
    assert build("arithmetic", largest=50).name == "arithmetic"
    assert refusal("gsm8") == (
        "task.name: there is no task 'gsm8'; did you mean 'gsm8k'? Valid names: arithmetic, boxed, "
        "math, gsm8k, reward, environment, calculator, python, dungeon, sqlite, written_calculator, "
        "verifiers, gym:NAME, gym_retries:NAME, package.module:attribute, path/to/file.py:attribute"
    )


def test_options_of_a_wrong_type_are_explained():
    with pytest.raises(TaskError, match=r"task.options: .* do not fit task 'arithmetic'"):
        build("arithmetic", largest="x")


def test_the_verifiers_settings_reach_the_task():
    rows = [{"problem": f"{i}?", "answer": str(i)} for i in range(50)]
    settings = VerifierSettings(workers=1, time_limit=3.5)
    options = {"train": rows, "verifier": {"workers": 1, "time_limit": 3.5}}
    assert make_task(TaskSettings(name="boxed", options=options))._settings == settings
    assert make_task(TaskSettings(name="boxed", options={"train": rows}))._settings == VerifierSettings()


def test_a_recipe_carries_options_and_verifier_and_reads_back():
    data = {
        "agents": AGENTS,
        "output": "runs/x",
        "task": {"name": "math", "options": {"train": {"path": "a.jsonl"}, "verifier": {"time_limit": 2.0}}},
    }
    config = build_config(data)
    assert config.task.options == {"train": {"path": "a.jsonl"}, "verifier": {"time_limit": 2.0}}
    assert "time_limit: 2.0" in config_to_yaml(config)
    with pytest.raises(ConfigError, match=r"task.option: unknown key; did you mean 'options'\?"):
        build_config({**data, "task": {"option": {}}})


def test_tasks_import_nothing_heavy_before_first_use():
    code = (
        "import sys, hacrl.tasks.registry, hacrl.tasks.boxed, hacrl.tasks.gym.task, hacrl.tasks.rewards, "
        "hacrl.tasks.bundled, hacrl.tasks.gym.retries\n"
        "print(sorted({'torch', 'numpy', 'datasets', 'pyarrow', 'reasoning_gym', 'sympy', 'math_verify'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_library_comes_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"x")
    message = refusal("boxed", train=str(path))
    assert message.startswith(f"task.options.train: reading {path} needs the package 'pyarrow'")
    assert message.endswith("install it with: pip install 'hacrl[data]'")
    monkeypatch.setattr("hacrl.tasks.gym.processes.find_spec", lambda name: None)
    assert refusal("gym:gcd").endswith("needs reasoning-gym; install it with: pip install 'hacrl[gym]'")
