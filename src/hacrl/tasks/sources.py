"""Rows from anywhere: a data set of the Hugging Face hub, a local file or folder, or rows at hand.

Every error names the option (``train`` or ``test``), the file or data set, and the fix, and comes while the
task is built: before any model loads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.files import READERS, Row, read_rows
from hacrl.tasks.optional import optional_module

# What an option may hold: a path or hub id, the keys of a DataSource, or the rows themselves.
Given = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows come from. Only ``path`` is needed; ``name`` is a configuration of a hub data set."""

    path: str  # a file, a folder, or a hub id such as openai/gsm8k
    name: str | None = None
    split: str | None = None  # None: "train" for train, "test" for test
    revision: str | None = None  # branch, tag or commit of a hub data set
    columns: Mapping[str, str] = field(default_factory=dict)  # goes before the task's own column names

    @property
    def label(self) -> str:
        """How messages call it: ``openai/gsm8k (main, test)``."""
        details = ", ".join(part for part in (self.name, self.split, self.revision) if part)
        return f"{self.path} ({details})" if details else self.path


@dataclass(frozen=True)
class Table:
    """The rows of one option, and what messages call them."""

    option: str  # "train" or "test"
    label: str
    rows: tuple[Row, ...]
    by_line: bool = False  # row numbers are lines of a file
    columns: Mapping[str, str] = field(default_factory=dict)

    def place(self, row: Row) -> str:
        """Where a row stands, e.g. ``data/train.jsonl:17``."""
        return f"{self.label}:{row.number}" if self.by_line else f"{self.label}, row {row.number}"

    def error(self, message: str, row: Row | None = None) -> TaskError:
        """An error that names the option and the data set, or the row."""
        return TaskError(f"{self.option}: {self.label if row is None else self.place(row)}: {message}")


def load_table(option: str, given: Given) -> Table:
    """Read all rows of ``train`` or ``test``; an empty data set is refused."""
    if isinstance(given, str | Path | Mapping):
        source = parse_source(option, given)
        try:
            table = _load_source(option, source)
        except TaskError as error:
            message = str(error)
            raise TaskError(
                message if message.startswith(f"{option}: ") else f"{option}: {message}"
            ) from error
    else:
        table = Table(option, "the rows given", tuple(_rows_at_hand(option, given)))
    if not table.rows:
        raise table.error("has no rows; give a data set that has some")
    return table


def parse_source(option: str, given: str | Path | Mapping[str, Any]) -> DataSource:
    """A path or hub id, or a mapping with ``path`` and what else is needed."""
    if not isinstance(given, Mapping):
        given = {"path": str(given)}
    known = [entry.name for entry in fields(DataSource)]
    for key, value in given.items():
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"a source has {', '.join(known)}"
            raise TaskError(f"{option}.{key}: unknown key; {hint}")
        if key == "columns":
            if not isinstance(value, Mapping):
                raise TaskError(f"{option}.columns={value!r}: must map e.g. problem to a column's name")
        elif not (isinstance(value, str) or (value is None and key != "path")):
            raise TaskError(f"{option}.{key}={value!r}: must be text")
    if not given.get("path"):
        raise TaskError(f"{option}.path: missing; give a file, a folder or the id of a hub data set")
    return DataSource(**given)


def _load_source(option: str, source: DataSource) -> Table:
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _table(option, source, _from_folder(option, source, path))
    if path.is_file():
        return _from_file(option, source, path)
    looks_like_a_file = path.suffix.lower() in READERS or source.path[0] in "/.~" or "\\" in source.path
    if looks_like_a_file or not _HUB_ID.fullmatch(source.path):
        raise TaskError(f"{source.path}: there is no such file or folder (looked in {Path.cwd()})")
    return _table(option, source, _from_hub(option, source))


def _from_file(option: str, source: DataSource, path: Path) -> Table:
    if path.suffix.lower() not in READERS:
        raise TaskError(f"{source.path}: a file must end in one of {', '.join(READERS)}")
    for key in ("name", "split", "revision"):
        if getattr(source, key) is not None:
            raise TaskError(f"{option}.{key}={getattr(source, key)!r}: {source.path} is a file and has none")
    by_line = path.suffix.lower() == ".jsonl"
    return Table(option, source.path, tuple(read_rows(path)), by_line, source.columns)


def _from_folder(option: str, source: DataSource, path: Path) -> Iterable[Mapping[str, Any]]:
    """A folder written by ``save_to_disk``, else one laid out like a hub data set."""
    datasets = optional_module("datasets", extra="data", needed_for=f"reading the folder {source.path}")
    saved, saved_splits = (path / "state.json").is_file(), (path / "dataset_dict.json").is_file()
    if not saved and not saved_splits:
        return _from_hub(option, source)
    loaded = datasets.load_from_disk(str(path))
    if saved_splits:
        split = source.split or option
        if split not in loaded:
            raise TaskError(
                f"{option}.split: {source.path} has no split {split!r}; it has {', '.join(loaded)}"
            )
        loaded = loaded[split]
    elif source.split is not None:
        raise TaskError(f"{option}.split={source.split!r}: {source.path} was saved without splits")
    rows: Iterable[Mapping[str, Any]] = loaded
    return rows


def _from_hub(option: str, source: DataSource) -> Iterable[Mapping[str, Any]]:
    datasets = optional_module("datasets", extra="data", needed_for=f"loading {source.path}")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            source.path, source.name, split=source.split or option, revision=source.revision
        )
    except ConnectionError as error:
        raise TaskError(
            f"{source.label}: the Hugging Face hub cannot be reached, and there is no copy in the local "
            f"cache ({error}); check the connection, or give a local file: task.options.{option}=FILE.jsonl"
        ) from error
    except Exception as error:  # it raises many kinds; each message says which name, split or file is wrong
        hint = "check path, name, split and revision"
        if isinstance(error, FileNotFoundError):  # DatasetNotFoundError is one
            hint = "there is no such file, folder or hub data set, or it is private or gated"
            if Path(source.path).expanduser().is_dir():
                hint = "give a file, or a folder laid out like a data set of the hub"
        cause = f": {error.__cause__}" if error.__cause__ else ""  # "while generating" says nothing by itself
        raise TaskError(f"{source.label}: cannot be loaded: {error}{cause} ({hint})") from error
    return rows


def _table(option: str, source: DataSource, rows: Iterable[Mapping[str, Any]]) -> Table:
    numbered = tuple(Row(number, values) for number, values in enumerate(rows, start=1))
    return Table(option, source.label, numbered, columns=source.columns)


def _rows_at_hand(option: str, given: Any) -> Iterable[Row]:
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TaskError(f"{option}={given!r}: must be a file, a hub data set, or rows")
    for number, values in enumerate(given, start=1):
        if not isinstance(values, Mapping):
            raise TaskError(f"{option}: row {number} must map columns to values, not {type(values).__name__}")
        yield Row(number, values)
