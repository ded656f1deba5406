"""The code of docs/extending.md runs as printed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hacrl.config.load import build_config
from hacrl.config.schema import TaskSettings
from hacrl.errors import ConfigError, TaskError
from hacrl.runs.run import run_locally
from hacrl.tasks.registry import make_task
from hacrl.tracking.registry import make_trackers

DOCS = Path(__file__).parent.parent / "docs" / "extending.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the guide's files in it."""
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**changes: object) -> dict:
    return {
        "agents": [{"name": "small", "model": "bundled:qwen-small-a"}],
        "output": "run",
        "steps": 1,
        "threads": 1,
        "method": "gspo",
        "rollout": {"prompts_per_step": 2, "rollouts_per_prompt": 2, "max_new_tokens": 4},
        "evaluation": {"problems": 0},
        **changes,
    }


def test_a_run_with_the_guides_task_and_tracker(folder: Path):
    task = {"name": "counting.py:Counting", "options": {"upto": 200}}
    result = run_locally(build_config(recipe(task=task, trackers=["lines.py:Lines"])))
    assert result.rollouts == {"small": 4}
    lines = (folder / "run" / "agents.txt").read_text().splitlines()
    assert sum(line.startswith("1 small ") for line in lines) == 2  # a response to each of two problems
    assert any("reward" in line for line in lines)


def test_a_module_of_the_working_folder(folder: Path):
    task = make_task(TaskSettings(name="counting:Counting", options={"upto": 30}))
    sys.modules.pop("counting")
    assert [len(task.train), len(task.test)] == [20, 10]


@pytest.mark.parametrize("group", ["hacrl.tasks", "hacrl.trackers"])
def test_installed_packages_offer_names(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str):
    site = folder / "site"
    (site / "others-1.0.dist-info").mkdir(parents=True)
    (site / "others-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: others\nVersion: 1.0\n"
    )
    target = {"hacrl.tasks": "counting:Counting", "hacrl.trackers": "lines:Lines"}[group]
    (site / "others-1.0.dist-info" / "entry_points.txt").write_text(f"[{group}]\nmine = {target}\n")
    monkeypatch.syspath_prepend(str(site))
    if group == "hacrl.tasks":
        assert make_task(TaskSettings(name="mine")).name == "counting"
        with pytest.raises(TaskError, match="did you mean 'mine'"):
            make_task(TaskSettings(name="mines"))
    else:
        (tracker,) = make_trackers(build_config(recipe(trackers=["mine"])), folder / "run")
        assert type(tracker._backend).__name__ == "Lines"
    sys.modules.pop(target.partition(":")[0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counting.py:Countin", "task.name: .* has no 'Countin'; did you mean 'Counting'?"),
        ("nowhere.py:Task", "task.name: .*nowhere.py does not exist"),
        ("no_such_module:Task", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("counting.py:Counting.name", "is not a class or function"),
        ("lines.py:Lines", "cannot|does not make a task|do not fit"),
    ],
)
def test_a_task_that_cannot_be_used(folder: Path, name: str, message: str):
    with pytest.raises(TaskError, match=message):
        make_task(TaskSettings(name=name))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lines.py:Line", "trackers: .*did you mean 'Lines'?"),
        ("counting.py:Counting", "does not make a hacrl.tracking.base.Backend"),
        ("collections:OrderedDic", "did you mean 'OrderedDict'"),
    ],
)
def test_a_tracker_that_cannot_be_used(folder: Path, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_trackers(build_config(recipe(trackers=[name])), folder / "run")
