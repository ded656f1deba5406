"""docs/python_api.md and docs/tracking.md agree with the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from hacrl import Callback, HACRLConfig
from hacrl.tracking.registry import BACKENDS
from hacrl.training.observer import Observer

DOCS = Path(__file__).parents[2] / "docs"
API, TRACKING = ((DOCS / name).read_text("utf-8") for name in ("python_api.md", "tracking.md"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", API, re.DOTALL | re.MULTILINE)


def test_the_blocks_of_the_documentation_run(tmp_path):
    """One after the other, in one script, as a reader would."""
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks("python")), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    folder, rewards, accuracy = done.stdout.splitlines()
    assert folder == "runs/first"
    assert len(ast.literal_eval(rewards)) == 2
    assert 0 <= float(accuracy) <= 1
    runs = {path.name for path in (tmp_path / "runs").iterdir()}
    assert runs == {"first", "second", "third", "two_rewards", "even", "stopped"}


def test_blocks_that_need_downloads_are_python():
    [block] = blocks("python no-run")
    ast.parse(block)


def section(text: str, heading: str) -> str:
    return text.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_every_key_is_documented_with_its_default():
    table = section(API, "HACRLConfig")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*)\|", table, re.MULTILINE))
    assert set(rows) == {field.name for field in fields(HACRLConfig)}
    config = HACRLConfig(output="x")
    for name, written in rows.items():
        if name != "output":
            assert ast.literal_eval(written.strip("` ")) == getattr(config, name), name


def test_every_method_of_a_callback_is_documented():
    described = set(re.findall(r"^\| `(on_\w+)\(", section(API, "Callbacks"), re.MULTILINE))
    assert described == {name for name in vars(Observer) if name.startswith("on_")}
    assert all(hasattr(Callback, name) for name in described)


def test_every_tracker_is_documented():
    assert set(re.findall(r"^\| `(\w+)` \| `pip install", TRACKING, re.MULTILINE)) == set(BACKENDS)
