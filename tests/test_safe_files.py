"""Reading files that are damaged, of the wrong kind, or outside their folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl import files as safe_files
from hacrl.errors import ConfigError, HacrlError
from hacrl.files import (
    JsonLines,
    MissingFileError,
    UnreadableFileError,
    as_record,
    check_file,
    check_inside,
    check_tree,
    iterate_jsonl,
    open_inside,
    read_json,
    read_jsonl,
    read_text,
)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder with a foreign file beside it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "secret.json").write_text('{"key": "mine"}')
    return tmp_path / "run"


def records(path: Path, folder: Path) -> list[dict]:
    return [line.record for line in read_jsonl(path, folder).lines]


def test_plain_files_are_read_and_written(run):
    with open_inside(run / "a.jsonl", run, "ab") as file:
        file.write('{"a": "é"}\n'.encode())
    with open_inside(run / "a.jsonl", run, "ab") as file:
        file.write(b'{"a": 2}\n')
    assert records(run / "a.jsonl", run) == [{"a": "é"}, {"a": 2}]
    with open_inside(run / "b.json", run, "wb") as file:
        file.write(b"[1, 2, 3]")
    with open_inside(run / "b.json", run, "wb") as file:
        file.write(b"[4]")  # shorter: nothing of the old one stays
    assert read_json(run / "b.json", run) == [4]
    with pytest.raises(MissingFileError, match=r"nowhere\.json does not exist"):
        read_json(run / "nowhere.json", run)
    with pytest.raises(MissingFileError):
        open_inside(run / "no" / "such" / "folder", run, "wb")


def test_links_are_followed_within_the_folder_only(run, tmp_path):
    (run / "own.json").write_text("[1]")
    (run / "inner.json").symlink_to("own.json")
    assert read_json(run / "inner.json", run) == [1]
    latest = tmp_path / "latest"
    latest.symlink_to(run)  # the folder itself may be reached by one
    assert read_json(latest / "inner.json", latest) == [1]
    assert read_json(run / "inner.json", latest) == [1]
    (run / "outer.json").symlink_to("../secret.json")
    (run / "elsewhere").symlink_to(tmp_path)
    (run / "dangling").symlink_to(tmp_path / "new.txt")
    for name in ("outer.json", "elsewhere/secret.json", "../secret.json", "dangling"):
        for mode in ("rb", "ab", "wb"):
            with pytest.raises(UnreadableFileError, match=r"leads out of .*replace the link by a copy"):
                open_inside(run / name, run, mode)
        with pytest.raises(UnreadableFileError, match="leads out of"):
            check_file(run / name, run)
    assert (tmp_path / "secret.json").read_text() == '{"key": "mine"}'
    assert not (tmp_path / "new.txt").exists()
    (tmp_path / "run-2").mkdir()  # begins with the same letters, and is another folder
    with pytest.raises(UnreadableFileError, match="leads out of"):
        check_inside(run / ".." / "run-2" / "x", run)
    check_inside(run / "a" / ".." / "b", run)


@pytest.mark.parametrize("mode", ["rb", "ab", "wb"])
def test_pipes_folders_and_devices_are_not_opened(run, mode):
    os.mkfifo(run / "pipe")
    (run / "folder").mkdir()
    (run / "loop").symlink_to("loop")
    for name, words in {"pipe": "is a pipe", "folder": "is a folder", "loop": "Too many levels"}.items():
        with pytest.raises(UnreadableFileError, match=f"{name}.*{words}"):
            open_inside(run / name, run, mode).close()
    with pytest.raises(UnreadableFileError, match="is a pipe, not a file"):
        check_file(run / "pipe", run)
    with pytest.raises(UnreadableFileError, match="is a device, not a file"):
        open_inside(Path("/dev/zero"), Path("/dev"), mode)
    with pytest.raises(UnreadableFileError, match="null"):
        open_inside(run / "a\0b", run, mode)
    with pytest.raises(UnreadableFileError, match="File name too long"):
        open_inside(run / ("x" * 300), run, mode)


def test_check_tree_covers_all_subfolders(run, tmp_path):
    (run / "agents" / "ada" / "deep").mkdir(parents=True)
    (run / "agents" / "ada" / "config.json").write_text("{}")
    (run / "agents" / "ada" / "again.json").symlink_to("config.json")
    check_tree(run / "agents" / "ada", run)
    os.mkfifo(run / "agents" / "ada" / "deep" / "model.safetensors")
    with pytest.raises(UnreadableFileError, match=r"deep/model\.safetensors is a pipe"):
        check_tree(run / "agents" / "ada", run)
    (run / "agents" / "ada" / "deep" / "model.safetensors").unlink()
    (run / "agents" / "ada" / "deep" / "up").symlink_to("..")  # a cycle of links
    check_tree(run / "agents" / "ada", run)
    (run / "agents" / "ada" / "deep" / "out").symlink_to(tmp_path)
    with pytest.raises(UnreadableFileError, match=r"deep/out leads out of"):
        check_tree(run / "agents" / "ada", run)
    (run / "agents" / "eve").symlink_to(tmp_path)
    with pytest.raises(UnreadableFileError, match=r"agents/eve leads out of"):
        check_tree(run / "agents" / "eve", run)
    with pytest.raises(UnreadableFileError, match="cannot be searched: No such file"):
        check_tree(run / "agents" / "bob", run)


def test_an_incomplete_last_line_is_ignored_and_noted(run):
    path = run / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": "\xc3')
    lines = read_jsonl(path, run)
    assert [(line.number, line.end) for line in lines.lines] == [(1, 9), (2, 18)]
    assert [line.record for line in lines.lines] == [{"a": 1}, {"a": 2}]
    assert lines.is_truncated
    assert lines.note == f"{path}: the last line (line 3) is incomplete and is ignored"
    path.write_bytes(
        b'{"a": 1}\n{"a": 2}'
    )  # without a newline: the writer may have meant to continue the line
    assert records(path, run) == [{"a": 1}]
    path.write_bytes(b'{"a": 1}\n')
    assert read_jsonl(path, run).note is None
    path.write_bytes(b"")
    assert read_jsonl(path, run) == JsonLines(path, (), is_truncated=False)
    path.write_bytes('{"a": "1\u2028\x85 2"}\n'.encode())  # to str.splitlines, three lines
    assert records(path, run) == [{"a": "1\u2028\x85 2"}]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"a": ', "line 2, is damaged: it is not valid JSON"),
        (b"", "line 2, is damaged: it is not valid JSON"),
        (b"\0" * 9, "line 2, is damaged: it is not valid JSON"),
        (b"[" * 100_000, "line 2, is damaged: it is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "line 2, is damaged: it is not valid JSON"),
        (b'{"a": "\xff"}', "line 2, is damaged: it is not UTF-8 text"),
        (b"[1]", "line 2, is damaged: it is not a mapping but list"),
        (b"null", "line 2, is damaged: it is not a mapping but NoneType"),
    ],
)
def test_a_damaged_line_in_the_middle_is_an_error(run, line, words):
    (run / "m.jsonl").write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    with pytest.raises(UnreadableFileError, match=words) as caught:
        read_jsonl(run / "m.jsonl", run)
    assert len(str(caught.value)) < 400
    first = iterate_jsonl(run / "m.jsonl", run)
    assert next(first).record == {"a": 1}


def test_sizes_are_bounded(run, monkeypatch):
    with (run / "big.json").open("wb") as file:
        file.truncate(2**40)  # a terabyte of nothing: reading it would fill the memory
    with pytest.raises(UnreadableFileError, match="is larger than 64 MiB"):
        read_json(run / "big.json", run)
    (run / "six").write_text("123456")
    assert read_text(run / "six", run, limit=6) == "123456"
    with pytest.raises(UnreadableFileError, match="larger than"):
        read_text(run / "six", run, limit=5)
    monkeypatch.setattr(safe_files, "LINE_LIMIT", 10)
    (run / "m.jsonl").write_text('{"a": 10}\n{"a": 100}\n')
    with pytest.raises(UnreadableFileError, match="line 2, is longer than"):
        read_jsonl(run / "m.jsonl", run)
    (run / "m.jsonl").write_text('{"a": 10}\n' + "x" * 11)  # no end in sight
    with pytest.raises(UnreadableFileError, match="line 2, is longer than"):
        read_jsonl(run / "m.jsonl", run)


@dataclass(frozen=True)
class Inner:
    share: float


@dataclass(frozen=True)
class Outer:
    name: str
    steps: tuple[int, ...]
    inner: dict[str, Inner]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "name: must be a valid string"),
        ({"steps": [1, "2"]}, "steps.1: must be a valid integer"),
        ({"steps": [True]}, "steps.0: must be a valid integer"),
        ({"inner": {"a": {}}}, "inner.a.share: missing"),
        ({"inner": {"a": {"share": "1"}}}, "inner.a.share: must be a valid number"),
        ({"inner": []}, "inner: must be a mapping"),
    ],
)
def test_a_record_needs_every_field_with_its_type(change, words):
    data = {"name": "x", "steps": [1, 2], "inner": {"a": {"share": 1}}, "more": "ignored"}
    assert as_record(data, Outer, "f.json") == Outer("x", (1, 2), {"a": Inner(1.0)})
    with pytest.raises(ConfigError) as caught:
        as_record({**data, **change}, Outer, "f.json")
    assert str(caught.value) == f"f.json is damaged or of another version: {words}"
    with pytest.raises(ConfigError, match="its content: must be a mapping"):
        as_record([], Outer, "f.json")


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(st.binary(max_size=80) | st.lists(st.dictionaries(st.text(), st.floats() | st.text(), max_size=2)))
def test_any_content_gives_records_or_one_error(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    written = (
        content
        if isinstance(content, bytes)
        else b"".join(json.dumps(one).encode() + b"\n" for one in content)
    )
    (folder / "f").write_bytes(written)
    try:
        lines = read_jsonl(folder / "f", folder)
    except HacrlError:
        assert isinstance(content, bytes)
        return
    assert len(lines.lines) == written.count(b"\n")
    assert lines.is_truncated is not (written.endswith(b"\n") or not written)
    if isinstance(content, list):
        assert [json.dumps(line.record) for line in lines.lines] == [json.dumps(one) for one in content]


def test_a_failed_replacement_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "disk full")

    path = tmp_path / "status.json"
    safe_files.write_text(path, "old")
    monkeypatch.setattr(safe_files, "flush_to_disk", full)
    with pytest.raises(OSError, match="disk full"):
        safe_files.write_text(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
    assert path.read_text() == "old"
