"""Real wandb, offline, in a process of its own; what it wrote for a later upload is read back."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.plain_text import printable
from tests.tracking.scenario import EXPECTED, NOTES, SHOWN

ROOT = Path(__file__).parents[2]

PLAY = """
import sys
from pathlib import Path
from hacrl.tracking.registry import make_trackers
from tests.tracking.scenario import config, play
folder = Path(sys.argv[1])
[tracker] = make_trackers(config(folder, "wandb", project="papers"), folder / "first")
play(tracker, saved=sys.argv[2] == "True")
"""


def play_offline(folder: Path, saved: bool, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(path for path in sys.path if path)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env = {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{paths}", "HOME": str(folder), **environment}
    command = [sys.executable, "-c", PLAY, str(folder), str(saved)]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )


def chunks(data: bytes):
    """The payloads of a LevelDB log, which a .wandb file is behind its own 7 bytes."""
    block, header, whole, first, middle = 32768, 7, 1, 2, 3
    position, partial = header, b""
    while position + header <= len(data):
        if block - position % block < header:  # too little room for a header: the block is padded
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + header])
        partial += data[position + header : position + header + length]
        position += header + length
        if kind not in (first, middle):
            yield partial
            partial = b""
        assert kind >= whole


def records(folder: Path):
    """What wandb wrote to disk and would send."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    for payload in chunks(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        yield record


def name_of(item) -> str:
    return item.key or ".".join(item.nested_key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("saved", [True, False])
def test_a_run_offline(tmp_path, saved):
    pytest.importorskip("wandb")
    done = play_offline(tmp_path, saved, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    assert "failed and is off" not in done.stderr
    kept = list(records(tmp_path))
    [run] = [record.run for record in kept if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("papers", "first")
    configured = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert configured["learning"]["lr"] == 0.125
    rows = [
        {name_of(item): json.loads(item.value_json) for item in record.history.item}
        for record in kept
        if record.WhichOneof("record_type") == "history"
    ]
    for name, values in EXPECTED.items():
        assert {row["_step"]: row[name] for row in rows if name in row} == values, name
    [exit_code] = [record.exit.exit_code for record in kept if record.WhichOneof("record_type") == "exit"]
    assert exit_code == (0 if saved else 1)

    tables = [
        json.loads(file.read_text()) for file in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    ]
    notes = [table["data"] for table in tables if table["columns"] == ["step", "note"]]
    listed = [[step, printable(note)] for step, note in NOTES.items()]
    assert sorted(notes, key=len) == [listed[:1], listed]  # the newest table has all notes
    shown = [table for table in tables if "response" in table["columns"]]
    assert len(shown) == 2  # one per step
    for table in shown:
        agent, response = table["columns"].index("agent"), table["columns"].index("response")
        assert [(row[agent], row[response]) for row in table["data"]] == SHOWN


@pytest.mark.filterwarnings("ignore")
def test_a_missing_login_is_refused_before_anything_starts(tmp_path):
    pytest.importorskip("wandb")
    done = play_offline(tmp_path, True)
    assert done.returncode == 1
    assert "ConfigError: trackers: wandb cannot log in" in done.stderr
    assert "WANDB_MODE=offline" in done.stderr
    assert list(tmp_path.glob("wandb/*run-*")) == []
