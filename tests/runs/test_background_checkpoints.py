"""Background checkpoints: the same files as others, one at a time; training waits if memory is short."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hacrl.config.schema import CheckpointSettings
from hacrl.errors import CheckpointError
from hacrl.runs.checkpoint import CheckpointStore
from hacrl.runs.checkpointer import Checkpointer, HostSnapshot
from hacrl.runs.run import run_locally
from tests.runs.test_snapshots import KINDS, pretend, set_bytes_left
from tests.support.chaos import chaos_config

STEPS = 2


@pytest.fixture(autouse=True)
def _enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_bytes_left(monkeypatch, None)


def test_a_checkpoint_is_written_before_the_next_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, happened, written = torch.zeros(4), [], []
    copying = threading.Event()
    real_copy, write = HostSnapshot.copy, CheckpointStore.write

    def seen_copy(self, content):
        copying.set()
        happened.append("copy")
        return real_copy(self, content)

    def slow_write(self, which, content, score=None):
        copying.wait(0.3)  # if a copy were taken meanwhile, it would be seen here
        written.append(content.tensors["agent-ada"]["0.master"].tolist())
        write(self, which, content, score)
        happened.append("written")

    monkeypatch.setattr(HostSnapshot, "copy", seen_copy)
    monkeypatch.setattr(CheckpointStore, "write", slow_write)
    checkpointer, trainer = checkpointer_of(tmp_path, weights)
    for step in (1, 2, 3):
        weights.fill_(step)
        trainer.steps_done = step
        checkpointer.save(trainer)
        copying.clear()
        weights.fill_(-1)
    checkpointer.close()
    assert happened == ["copy", "written"] * 3
    assert written == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_an_interrupted_wait_does_not_forget_the_pending_write(tmp_path: Path) -> None:
    class Interrupted(Future):  # still being written
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    checkpointer, trainer = checkpointer_of(tmp_path, torch.zeros(4))
    writing = checkpointer._pending = Interrupted()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(trainer)
    writing.set_result(None)
    checkpointer._pending = None
    checkpointer.close()
    assert checkpointer.store.ids() == []


def test_a_failed_write_is_reported_at_the_latest_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self, which, content, score=None):
        raise CheckpointError("disk full")

    monkeypatch.setattr(CheckpointStore, "write", fail)
    checkpointer, trainer = checkpointer_of(tmp_path, torch.zeros(4))
    checkpointer.save(trainer)
    with pytest.raises(CheckpointError, match="disk full"):
        checkpointer.close()
    checkpointer.close()  # reported once


def test_memory_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[weakref.ref[Tensor]] = []
    monkeypatch.setattr(
        CheckpointStore,
        "write",
        lambda self, which, content, score: places.append(
            weakref.ref(content.tensors["agent-ada"]["0.master"])
        ),
    )
    checkpointer, trainer = checkpointer_of(tmp_path, torch.zeros(4))
    checkpointer.save(trainer)
    checkpointer._finish_pending(wait=True)
    assert places[0]() is not None
    checkpointer.close()
    assert places[0]() is None


def checkpointer_of(path: Path, weights: Tensor) -> tuple[Checkpointer, SimpleNamespace]:
    trainer = SimpleNamespace(
        steps_done=1,
        phases_done=0,
        state_dict=lambda: {"under_way": None},
        tensors=lambda: {"ada": {"0.master": weights}},
        writes_tensors=False,
    )
    folder = SimpleNamespace(path=path, positions=dict)
    return Checkpointer(folder, CheckpointSettings(every=1), lambda _: None), trainer


@pytest.fixture(scope="module")
def foreground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that writes its checkpoints in the foreground."""
    folder = tmp_path_factory.mktemp("foreground") / "run"
    run_locally(settings(folder, background=False))
    return folder


def settings(folder: Path, background: bool):
    return chaos_config(
        folder, STEPS, checkpoint={"every": 1, "background": background}, evaluation={"problems": 0}
    )


def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the threads that write checkpoints, in order."""
    names, write = [], CheckpointStore.write

    def named(self, *arguments):
        names.append(threading.current_thread().name)
        write(self, *arguments)

    monkeypatch.setattr(CheckpointStore, "write", named)
    return names


def tensor_files(folder: Path) -> dict[str, bytes]:
    found = (folder / "checkpoints").rglob("*.safetensors")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_writes_the_same_in_the_background(
    foreground: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind)
    names = writers(monkeypatch)
    run_locally(settings(tmp_path / "run", background=True))
    here = threading.current_thread().name
    assert names == ["hacrl-checkpoint_0"] * STEPS + [here]  # the last one, when all is done, is waited for
    assert len(tensor_files(foreground)) == 2 * STEPS
    assert tensor_files(tmp_path / "run") == tensor_files(foreground)
    metrics, expected = ((folder / "metrics.jsonl").read_text() for folder in (tmp_path / "run", foreground))
    assert metrics == expected
    assert "checkpoint.background" not in notes(tmp_path / "run")


def test_without_memory_a_run_waits_for_its_checkpoints_and_notes_it_once(
    foreground: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = writers(monkeypatch)
    set_bytes_left(monkeypatch, 2**30)
    run_locally(settings(tmp_path / "run", background=True))
    assert names == [threading.current_thread().name] * (STEPS + 1)
    assert tensor_files(tmp_path / "run") == tensor_files(foreground)
    said = [line for line in notes(tmp_path / "run").splitlines() if "checkpoint.background" in line]
    assert len(said) == 1
    assert said[0].startswith("step 1: checkpoint.background: 0.0")
    assert said[0].endswith(
        "GiB more host memory are needed and 1.00 GiB are available, of which 1.00 GiB are reserved, "
        "so training waits while checkpoints are written"
    )


def notes(folder: Path) -> str:
    path = folder / "notes.txt"
    return path.read_text() if path.exists() else ""
