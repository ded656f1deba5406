"""Real trackio, local, in a process of its own; read back with trackio's own API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.plain_text import printable
from tests.tracking.scenario import EXPECTED, NOTES, SHOWN

ROOT = Path(__file__).parents[2]

PLAY = """
import json, sys
from pathlib import Path
from hacrl.tracking.registry import make_trackers
from tests.tracking.scenario import config, play
folder = Path(sys.argv[1])
[tracker] = make_trackers(config(folder, "trackio", project="papers"), folder / "first")
play(tracker)
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("papers", "first")
found = {"logs": logs, "config": SQLiteStorage.get_run_config("papers", "first")}
Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.filterwarnings("ignore")
def test_a_local_run(tmp_path):
    pytest.importorskip("trackio")
    paths = os.pathsep.join(path for path in sys.path if path)
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{paths}",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    command = [sys.executable, "-c", PLAY, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "failed and is off" not in done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    for name, values in EXPECTED.items():
        assert {row["step"]: row[name] for row in found["logs"] if name in row} == values, name
    assert found["config"]["learning"]["lr"] == 0.125
    tables = {row["step"]: row["rollouts"]["_value"] for row in found["logs"] if "rollouts" in row}
    assert sorted(tables) == [1, 2]
    notes = [row["notes"]["_value"] for row in found["logs"] if "notes" in row]
    listed = [{"step": step, "note": printable(note)} for step, note in NOTES.items()]
    assert notes == [listed[:1], listed]  # the newest table has all notes
    for table in tables.values():
        assert [(row["agent"], row["response"]) for row in table] == SHOWN
