"""Checkpoints appear complete or not at all, and a damaged checkpoint is never used."""

from __future__ import annotations

import errno
import json
import os
import subprocess

import pytest
import torch

from hacrl import files
from hacrl.errors import CheckpointError
from hacrl.runs import checkpoint
from hacrl.runs.checkpoint import CheckpointContent, CheckpointId, CheckpointStore


def content(value: float, size: int = 8) -> CheckpointContent:
    return CheckpointContent(
        {"trainer": {"value": value}}, {"agent-ada": {"0.master": torch.full((size,), value)}}
    )


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def write(store: CheckpointStore, *steps: int, score: float | None = None) -> None:
    for step in steps:
        store.write(CheckpointId(step), content(float(step)), score)


def test_content_is_read_back_exactly(store):
    numbers = torch.tensor([1.1, -0.0, 3e-45, float("inf")])
    halves = torch.tensor([1.1, 2.7], dtype=torch.bfloat16)
    given = CheckpointContent(
        {"trainer": {"x": 0.1, "text": "ä\ud800"}}, {"agent-a.b-c_d": {"1": numbers, "2": halves}}
    )
    store.write(CheckpointId(7, 2), given)
    which, read, problems = store.newest_intact()
    assert (which, problems) == (CheckpointId(7, 2), [])
    assert read.documents == given.documents
    group = read.tensors["agent-a.b-c_d"]
    assert group["1"].view(torch.int32).tolist() == numbers.view(torch.int32).tolist()
    assert group["2"].dtype == torch.bfloat16
    assert torch.equal(group["2"], halves)


def test_order_of_finished_and_partial_steps():
    ids = [CheckpointId(2, 1), CheckpointId(10), CheckpointId(2), CheckpointId(2, 3)]
    assert [one.folder for one in sorted(ids)] == [
        "step-000002",
        "step-000002-01",
        "step-000002-03",
        "step-000010",
    ]
    assert CheckpointId.parse("step-1234567-12") == CheckpointId(1234567, 12)
    assert CheckpointId.parse(".step-000002.unfinished") is None


def test_prune_keeps_the_newest_and_the_best(store):
    write(store, 1, score=0.9)
    write(store, 2, 3, score=0.2)
    write(store, 4, score=0.5)
    write(store, 5)
    store.write(CheckpointId(3, 1), content(3.1))  # in the middle of step 4, which is finished by now
    store.prune(keep_last=1, keep_best=2)
    assert store.ids() == [CheckpointId(1), CheckpointId(4), CheckpointId(5)]
    store.write(CheckpointId(5, 2), content(5.2))
    store.prune(keep_last=1, keep_best=0)
    assert store.ids() == [CheckpointId(5), CheckpointId(5, 2)]


def damage_flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def damage_link(path):
    copy = path.parent.parent.parent / "outside"
    copy.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(copy)


def damage_pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("file", ["manifest.json", "trainer.json", "agent-ada.safetensors"])
@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_link, damage_pipe, os.unlink])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(store, file, damage):
    write(store, 1, 2)
    damage(store.path(CheckpointId(2)) / file)
    which, read, problems = store.newest_intact()
    assert which == CheckpointId(1)
    assert read.tensors["agent-ada"]["0.master"].tolist() == [1.0] * 8
    assert len(problems) == 1
    assert "step-000002" in problems[0]


def test_a_flipped_bit_in_any_byte_is_found(store):
    write(store, 1)
    folder = store.path(CheckpointId(1))
    for name in ("trainer.json", "agent-ada.safetensors"):
        raw = (folder / name).read_bytes()
        for place in range(len(raw)):
            (folder / name).write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
            with pytest.raises(CheckpointError, match=name):
                store.read(CheckpointId(1))
        (folder / name).write_bytes(raw)
    store.read(CheckpointId(1))


@pytest.mark.parametrize(
    "manifest",
    [
        {"schema": 2, "files": {}},
        {"schema": 1, "files": {"../../secret.json": {"bytes": 1, "sha256": ""}}},
        {"schema": 1, "files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}},
        {"schema": 1, "files": {"x.pkl": {"bytes": 1, "sha256": ""}}},
        {"schema": 1, "files": []},
        {"schema": 1, "files": {"x.json": 3}},
        {"files": {}},
        [],
        3,
    ],
    ids=str,
)
def test_invalid_manifests_are_refused(store, manifest):
    write(store, 1)
    (store.path(CheckpointId(1)) / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        store.newest_intact()


def test_no_checkpoint_is_none_and_only_damaged_ones_are_an_error(store):
    assert store.newest_intact() is None
    write(store, 1, 2)
    for which in store.ids():
        damage_flip(store.path(which) / "trainer.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint .* can be used: .*step-000002.*step-000001"):
        store.newest_intact()


@pytest.mark.parametrize(
    ("function", "least"), [("flush_to_disk", 4), ("sha256_of", 1), ("write_tensors", 1)]
)
def test_a_crash_while_writing_leaves_earlier_checkpoints_intact(store, monkeypatch, function, least):
    """The process dies at every point where it writes tensors, flushes to disk or reads back."""
    write(store, 1)
    points = 0
    while _is_stopped(store, monkeypatch, function, after=points):
        which, _, problems = store.newest_intact()
        assert which in (CheckpointId(1), CheckpointId(2))
        assert problems == []
        points += 1
    assert points >= least
    assert store.newest_intact()[0] == CheckpointId(2)


def _is_stopped(store, monkeypatch, function, after) -> bool:
    """Write the second checkpoint; the process "dies" at a call of a function."""
    module = checkpoint if function == "write_tensors" else files
    real, calls = getattr(module, function), []

    def stop(path, *given):
        calls.append(path)
        if len(calls) > after:
            path.parent.joinpath("begun").write_bytes(b"a part")
            raise KeyboardInterrupt
        return real(path, *given)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, stop)
        patch.setattr(f"hacrl.runs.checkpoint.{function}", stop, raising=False)
        try:
            write(store, 2)
        except KeyboardInterrupt:
            return True
    return False


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one mebibyte."""
    where = tmp_path / "disk"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], check=False).returncode:
        pytest.skip("this user may not mount")
    yield where
    subprocess.run(["umount", "-l", where], check=True)


def test_a_full_disk(small_disk):
    store = CheckpointStore(small_disk / "checkpoints")
    write(store, 1)
    with pytest.raises(
        CheckpointError, match=r"disk full: .* the last checkpoint is .*step-000001.*hacrl resume"
    ):
        store.write(CheckpointId(2), content(2.0, size=2**19))  # 2 MiB: refused before writing
    (small_disk / "others").write_bytes(b"x" * (2**20 - 2**18))  # now the disk fills while writing
    with pytest.raises(CheckpointError, match="disk full"):
        store.write(CheckpointId(3), content(3.0, size=2**16 - 2**12))
    which, read, problems = store.newest_intact()
    assert (which, problems) == (CheckpointId(1), [])
    assert read.documents["trainer"] == {"value": 1.0}
    assert [path.name for path in store.folder.iterdir()] == ["step-000001"]


def test_a_read_only_folder(small_disk):
    store = CheckpointStore(small_disk / "checkpoints")
    write(store, 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*Read-only.*step-000001"):
        write(store, 2)
    assert store.newest_intact()[0] == CheckpointId(1)


def test_other_errors_keep_their_message(store, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    write(store, 1)
    monkeypatch.setattr("hacrl.runs.checkpoint.publish_folder", fail)
    with pytest.raises(CheckpointError, match=r"Input/output error.*step-000001"):
        write(store, 2)
    assert store.ids() == [CheckpointId(1)]


def test_a_document_is_replaced_atomically(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    files.write_json(path, {"state": "running"})

    def crash(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "flush_to_disk", crash)
    with pytest.raises(KeyboardInterrupt):
        files.write_json(path, {"state": "finished"})
    assert json.loads(path.read_text()) == {"state": "running"}
