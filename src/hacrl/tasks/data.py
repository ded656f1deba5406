"""Load the rows of a task's ``train`` or ``test`` option.

The option holds a local file (JSONL, JSON, CSV, Parquet), a folder, a Hugging Face data set or the rows
themselves. Every error names the option, the file or data set, and the fix. Tasks load their rows when they
are built, so all errors come before any model loads.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from hacrl.errors import TaskError
from hacrl.plugins import optional_module

# What a data option may hold: a path or hub id, the keys of a DataSource, or the rows themselves.
DataOption = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Row:
    """One row and its position: the line number in a JSONL file, else the row number, counted from 1."""

    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """Where rows come from. Only ``path`` is required; ``name`` is a configuration of a hub data set."""

    path: str  # a file, a folder, or a hub id such as openai/gsm8k
    name: str | None = None
    split: str | None = None  # None: "train" for train, "test" for test
    revision: str | None = None  # branch, tag or commit of a hub data set
    columns: Mapping[str, str] = field(default_factory=dict)  # overrides the task's own column names

    @property
    def label(self) -> str:
        """The name that messages use, e.g. ``openai/gsm8k (main, test)``."""
        details = ", ".join(part for part in (self.name, self.split, self.revision) if part)
        return f"{self.path} ({details})" if details else self.path


@dataclass(frozen=True)
class Table:
    """The rows of one option, and the name that messages use for them."""

    option: str  # "train" or "test"
    label: str
    rows: tuple[Row, ...]
    numbered_by_line: bool = False  # row numbers are line numbers of a file
    columns: Mapping[str, str] = field(default_factory=dict)

    def location(self, row: Row) -> str:
        """Return the position of a row, e.g. ``data/train.jsonl:17``."""
        return f"{self.label}:{row.number}" if self.numbered_by_line else f"{self.label}, row {row.number}"

    def error(self, message: str, row: Row | None = None) -> TaskError:
        """Return an error that names the option and the data set, or the row."""
        return TaskError(f"{self.option}: {self.label if row is None else self.location(row)}: {message}")


def load_table(option: str, given: DataOption) -> Table:
    """Read all rows of ``train`` or ``test``. Raise TaskError for an empty data set."""
    if type(given).__name__ == "DataFrame":
        given = cast(Any, given).to_dict(orient="records")
    _refuse_many_tables(option, given)
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
        table = Table(option, "the rows given", tuple(_rows_from_iterable(option, given)))
    if not table.rows:
        raise table.error("has no rows; give a data set that has some")
    return table


def _refuse_many_tables(option: str, given: Any) -> None:
    """Refuse a mapping of splits or of columns, which looks like the keys of a data source."""
    if not isinstance(given, Mapping) or not given or "path" in given:
        return
    names = ", ".join(map(repr, list(given)[:4]))
    first = next(iter(given.values()))
    if isinstance(first, str) or first is None or isinstance(first, Mapping):
        return  # the keys of a source, perhaps misspelt
    if isinstance(first, Iterable) and hasattr(first, "column_names"):
        raise TaskError(f"{option}: has several splits ({names}); give one of them")
    if isinstance(first, Iterable):
        raise TaskError(
            f"{option}: is a mapping of {names} to lists; give a list of rows, each a mapping of columns to "
            "values, or datasets.Dataset.from_dict(...) of it"
        )


def parse_source(option: str, given: str | Path | Mapping[str, Any]) -> DataSource:
    """Return the data source that a path, a hub id or a mapping of its fields describes."""
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
        return _numbered_table(option, source, _from_folder(option, source, path))
    if path.is_file():
        return _from_file(option, source, path)
    looks_like_a_file = path.suffix.lower() in READERS or source.path[0] in "/.~" or "\\" in source.path
    if looks_like_a_file or not _HUB_ID.fullmatch(source.path):
        raise TaskError(f"{source.path}: there is no such file or folder (looked in {Path.cwd()})")
    return _numbered_table(option, source, _from_hub(option, source))


def _from_file(option: str, source: DataSource, path: Path) -> Table:
    if path.suffix.lower() not in READERS:
        raise TaskError(f"{source.path}: a file must end in one of {', '.join(READERS)}")
    for key in ("name", "split", "revision"):
        if getattr(source, key) is not None:
            raise TaskError(f"{option}.{key}={getattr(source, key)!r}: {source.path} is a file and has none")
    is_jsonl = path.suffix.lower() == ".jsonl"
    return Table(option, source.path, tuple(read_rows(path)), is_jsonl, source.columns)


def _from_folder(option: str, source: DataSource, path: Path) -> Iterable[Mapping[str, Any]]:
    """Read a folder written by ``save_to_disk``, else one with the layout of a hub data set."""
    datasets = _datasets(f"reading the folder {source.path}")
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
    datasets = _datasets(f"loading {source.path}")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            source.path, source.name, split=source.split or option, revision=source.revision
        )
    except ConnectionError as error:
        raise TaskError(
            f"{source.label}: the Hugging Face hub cannot be reached, and there is no copy in the local "
            f"cache ({error}); check the connection, or give a local file: task.options.{option}=FILE.jsonl"
        ) from error
    except Exception as error:  # load_dataset raises many types; their messages name the wrong part
        hint = "check path, name, split and revision"
        if isinstance(error, FileNotFoundError):  # DatasetNotFoundError is one
            hint = "there is no such file, folder or hub data set, or it is private or gated"
            if Path(source.path).expanduser().is_dir():
                hint = "give a file, or a folder laid out like a data set of the hub"
        cause = f": {error.__cause__}" if error.__cause__ else ""  # error alone may say nothing
        raise TaskError(f"{source.label}: cannot be loaded: {error}{cause} ({hint})") from error
    return rows


def _datasets(needed_for: str) -> Any:
    """Import datasets. Its progress bars are off if those of transformers are."""
    datasets = optional_module("datasets", extra="data", needed_for=needed_for)
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        datasets.disable_progress_bars()
    return datasets


def _numbered_table(option: str, source: DataSource, rows: Iterable[Mapping[str, Any]]) -> Table:
    numbered = tuple(Row(number, values) for number, values in enumerate(rows, start=1))
    return Table(option, source.label, numbered, columns=source.columns)


def _rows_from_iterable(option: str, given: Any) -> Iterable[Row]:
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise TaskError(f"{option}={given!r}: must be a file, a hub data set, or rows")
    for number, values in enumerate(given, start=1):
        if not isinstance(values, Mapping):
            raise TaskError(f"{option}: row {number} must map columns to values, not {type(values).__name__}")
        yield Row(number, values)


def read_rows(path: Path) -> list[Row]:
    """Read all rows of a file, whose suffix decides the format. Errors name the file and the line."""
    try:
        return list(READERS[path.suffix.lower()](path))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    # utf-8-sig drops the byte order mark that some editors write
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except json.JSONDecodeError as error:
                raise TaskError(
                    f"{path}:{number}: not valid JSON ({error.msg} at column {error.colno}); "
                    "a JSONL file has one whole JSON object on each line"
                ) from error
            yield Row(number, _require_mapping(values, f"{path}:{number}"))


def _read_json(path: Path) -> Iterator[Row]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        hint = "; if it has one object a line, name it .jsonl" if error.msg == "Extra data" else ""
        raise TaskError(
            f"{path}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno}){hint}"
        ) from error
    if not isinstance(items, list):
        raise TaskError(
            f"{path}: must hold a list of objects, [{{...}}, {{...}}], not {type(items).__name__}"
        )
    for number, values in enumerate(items, start=1):
        yield Row(number, _require_mapping(values, f"{path}, row {number}"))


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            repeated = [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]
            if repeated:
                raise TaskError(
                    f"{path}: two columns are called {repeated[0]!r}; rename one in the first line"
                )
            for number, values in enumerate(reader, start=1):
                if None in values:  # DictReader's key for surplus fields
                    raise TaskError(
                        f"{path}:{reader.line_num}: more fields than the first line has columns "
                        f"({len(reader.fieldnames or ())}); put fields that hold commas in double quotes"
                    )
                yield Row(number, dict(values))
        except csv.Error as error:
            # line_num counts the lines read without error; the bad line is the next
            raise TaskError(f"{path}:{reader.line_num + 1}: not valid CSV: {error}") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = optional_module("pyarrow.parquet", extra="data", needed_for=f"reading {path}")
    pyarrow = optional_module("pyarrow", extra="data", needed_for=f"reading {path}")
    try:
        items = parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise TaskError(f"{path}: not a Parquet file that can be read: {error}") from error
    for number, values in enumerate(items, start=1):
        yield Row(number, values)


def _require_mapping(values: Any, location: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise TaskError(f"{location}: must be an object with named columns, not {type(values).__name__}")
    return values


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
