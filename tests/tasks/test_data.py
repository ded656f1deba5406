"""Rows from files, folders and the hub; every way in which they can be wrong says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.data import DataSource, load_table, parse_source

ROWS = [
    {"problem": "1+1", "answer": "2", "meta": {"level": 3}},
    {"problem": "2+2", "answer": "4", "meta": {"level": 1}},
]


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def values(option: str, given) -> list[dict]:
    return [dict(row.values) for row in load_table(option, given).rows]


def refused(given, option: str = "train") -> str:
    with pytest.raises(TaskError) as caught:
        load_table(option, given)
    return str(caught.value)


def test_jsonl_keeps_the_numbers_of_its_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"problem": "na\xc3\xafve"}\n\n  \n{"problem": "b"}'
    )  # a byte order mark, blanks
    table = load_table("train", str(path))
    assert [dict(row.values) for row in table.rows] == [{"problem": "naïve"}, {"problem": "b"}]
    assert [table.location(row) for row in table.rows] == [f"{path}:1", f"{path}:4"]


def test_line_separators_inside_text_end_no_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"  # GSM8K has such characters; str.splitlines would break there
    rows = [{"problem": "a\u2028b\x85c"}, {"problem": "d"}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    assert values("train", str(path)) == rows


def test_json_is_a_list_of_objects(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS))
    table = load_table("train", str(path))
    assert [dict(row.values) for row in table.rows] == ROWS
    assert table.location(table.rows[1]) == f"{path}, row 2"


def test_csv_with_quoted_commas_and_line_breaks(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text('problem,answer\n"one, two\nthree",3\nshort\n')
    assert values("train", str(path)) == [
        {"problem": "one, two\nthree", "answer": "3"},
        {"problem": "short", "answer": None},
    ]


def test_parquet_and_a_folder_saved_by_datasets(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    assert values("train", str(tmp_path / "a.parquet")) == ROWS
    assert values("train", str(tmp_path / "saved")) == ROWS
    assert "train.split='test': " in refused({"path": str(tmp_path / "saved"), "split": "test"})
    (tmp_path / "broken.parquet").write_text("no")
    assert f"train: {tmp_path / 'broken.parquet'}: not a Parquet file" in refused(
        str(tmp_path / "broken.parquet")
    )


def test_a_saved_folder_with_splits_takes_the_one_named_like_the_option(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    both = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    folder = str(tmp_path / "both")
    assert (len(values("train", folder)), len(values("test", folder))) == (2, 1)
    assert len(values("test", {"path": folder, "split": "train"})) == 2
    message = refused({"path": folder, "split": "dev"})
    assert message == f"train: train.split: {folder} has no split 'dev'; it has train, test"


def test_a_folder_laid_out_like_a_hub_data_set(tmp_path: Path, monkeypatch):
    """The real loader of hub data sets, on a folder: splits by file name, configurations by its card."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "repo"
    (repo / "main").mkdir(parents=True)
    write_jsonl(repo / "main" / "train.jsonl", ROWS)
    write_jsonl(repo / "main" / "test.jsonl", ROWS[1:])
    (repo / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n"
        "  - {split: test, path: main/test.jsonl}\n---\n"
    )
    assert values("train", {"path": str(repo), "name": "main"}) == ROWS
    assert values("test", str(repo)) == ROWS[1:]
    assert len(values("test", {"path": str(repo), "split": "train[:1]"})) == 1
    message = refused({"path": str(repo), "name": "socratic"})
    assert message.startswith(
        f"train: {repo} (socratic): cannot be loaded: BuilderConfig 'socratic' not found."
    )
    assert "Should be one of ['train', 'test']" in refused({"path": str(repo), "split": "dev"})


def test_a_folder_without_data_says_what_it_must_be(tmp_path: Path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "empty").mkdir()
    assert refused(str(tmp_path / "empty")).endswith(
        "(give a file, or a folder laid out like a data set of the hub)"
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_bytes(b"\x00\x01")
    message = refused(str(tmp_path / "broken"))
    assert "JSON parse error" in message  # the cause, not only that something happened
    assert message.endswith("(check path, name, split and revision)")


def test_without_the_hub_a_local_file_is_proposed(tmp_path: Path):
    """In a process of its own: whether the hub may be asked is decided when its library is imported."""
    pytest.importorskip("datasets")
    code = "import hacrl.tasks.data as s; s.load_table('test', {'path': 'some/thing', 'name': 'main'})"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    message = done.stderr.strip().splitlines()[-1]
    assert "TaskError: test: some/thing (main): the Hugging Face hub cannot be reached" in message
    assert message.endswith("or give a local file: task.options.test=FILE.jsonl")


@pytest.mark.parametrize(
    "missing", ["nowhere.jsonl", "a/b/nowhere.parquet", "/no/such/folder", "./here", "a/b/c"]
)
def test_a_missing_file_is_not_looked_for_on_the_hub(missing: str):
    message = refused(missing)
    assert message.startswith(f"train: {missing}: there is no such file or folder (looked in {Path.cwd()}")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', ":2: not valid JSON (Expecting value at column"),
        ("a.jsonl", '{"a": 1}\n[1]\n', ":2: must be an object with named columns, not list"),
        (
            "a.json",
            '{"a": 1}\n{"a": 2}\n',
            ":2: not valid JSON (Extra data at column 1); if it has one object a line, ",
        ),
        ("a.json", '{"a": 1}', ": must hold a list of objects, [{...}, {...}], not dict"),
        ("a.json", '[{"a": 1}, 2]', ", row 2: must be an object with named columns, not int"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", ":3: more fields than the first line has columns (2); "),
        ("a.csv", "a,b,a\n1,2,3\n", ": two columns are called 'a'; rename one in the first line"),
        ("a.csv", 'a,b\n"1"x,2\n', ":2: not valid CSV: "),
        ("a.jsonl", "", ": has no rows; give a data set that has some"),
        ("a.csv", "a,b\n", ": has no rows; give a data set that has some"),
        ("a.txt", "x", ": a file must end in one of .jsonl, .json, .csv, .parquet"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path: Path, name: str, content: str, expected: str):
    path = tmp_path / name
    path.write_text(content)
    assert refused(str(path)).startswith(f"train: {path}{expected}")


def test_text_in_another_encoding(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps({"problem": "naïve"}, ensure_ascii=False).encode("latin-1"))
    assert refused(str(path)).startswith(f"train: {path} is not UTF-8 text (")


def test_data_sources_are_parsed():
    assert parse_source("train", "openai/gsm8k") == DataSource(path="openai/gsm8k")
    whole = DataSource(path="a/b", name="main", split="test", revision="v1", columns={"problem": "q"})
    given = {"path": "a/b", "name": "main", "split": "test", "revision": "v1", "columns": {"problem": "q"}}
    assert parse_source("train", given) == whole
    assert whole.label == "a/b (main, test, v1)"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"pth": "a"}, "train.pth: unknown key; did you mean 'path'?"),
        (
            {"path": "a", "zzz": 1},
            "train.zzz: unknown key; a source has path, name, split, revision, columns",
        ),
        ({"name": "main"}, "train.path: missing; give a file"),
        ({"path": ""}, "train.path: missing; give a file"),
        ({"path": "a", "split": 3}, "train.split=3: must be text"),
        ({"path": "a", "columns": "b"}, "train.columns='b': must map"),
        (7, "train=7: must be a file, a hub data set, or rows"),
        ([{"a": 1}, "b"], "train: row 2 must map columns to values, not str"),
        ([], "train: the rows given: has no rows"),
    ],
)
def test_invalid_data_sources_are_refused(given, expected: str):
    assert refused(given).startswith(expected)


def test_a_file_has_no_splits(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert (
        refused({"path": path, "split": "train"})
        == f"train: train.split='train': {path} is a file and has none"
    )


def test_rows_as_mappings_and_hugging_face_data_sets():
    assert values("train", iter(ROWS)) == ROWS
    datasets = pytest.importorskip("datasets")
    assert values("train", datasets.Dataset.from_list(ROWS)) == ROWS
    both = datasets.DatasetDict(dev=datasets.Dataset.from_list(ROWS))
    assert refused(both).startswith("train: has several splits ('dev'); give one of them")
