"""The code of docs/environments.md runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hacrl.environments.interface import EnvironmentLimits
from hacrl.processes import python_environment

GUIDE = Path(__file__).parents[2] / "docs" / "environments.md"


def test_the_guides_environments(tmp_path: Path):
    text = GUIDE.read_text("utf-8").partition("## What an environment can")[0]
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (tmp_path / name[1]).write_text(block)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "by_hand.py"],
        cwd=tmp_path,
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == (printed, "")


def test_the_table_of_limits():
    text = GUIDE.read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text, re.MULTILINE))
    limits = EnvironmentLimits()
    for name in EnvironmentLimits.__slots__:
        value = getattr(limits, name)
        assert rows[name] == ("8 per core" if value is None else f"{value:g}")
