"""Which column of a data set holds what. Dotted names reach into nested ones: ``meta.gold``.

Rows of local files: JSONL, JSON and CSV with the standard library, Parquet with pyarrow.

Rows from anywhere: a data set of the Hugging Face hub, a local file or folder, or rows at hand.

Every error names the option (``train`` or ``test``), the file or data set, and the fix, and comes while the
task is built: before any model loads.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hacrl.errors import TaskError
from hacrl.plugins import optional_module

ABSENT: Any = object()  # the row has no such column; None is a value that is missing
_LOOK_AT = 1000  # rows whose columns a message lists


def check_columns(
    columns: Mapping[str, str] | None, purposes: Sequence[str], option: str = "columns"
) -> Mapping[str, str]:
    """The user's ``columns`` option, with known purposes and text as values."""
    if columns is not None and not isinstance(columns, Mapping):
        raise TaskError(f"{option}={columns!r}: must map {' or '.join(purposes)} to the name of a column")
    for purpose, column in (columns or {}).items():
        if purpose not in purposes:
            near = get_close_matches(str(purpose), purposes, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(purposes)}"
            raise TaskError(f"{option}.{purpose}: unknown; {hint}")
        if not isinstance(column, str) or not column:
            raise TaskError(f"{option}.{purpose}={column!r}: must be the name of a column")
    return columns or {}


def columns_of(table: Table, columns: Mapping[str, str], purposes: Sequence[str]) -> Mapping[str, str]:
    """The task's column names, with those of the source itself going first."""
    return {**columns, **check_columns(table.columns, purposes, f"{table.option}.columns")}


def find_column(
    table: Table, purpose: str, columns: Mapping[str, str], usual: Sequence[str] = ()
) -> str | None:
    """The column the user named, checked to be there; else the first usual one there is; else None."""
    wanted = columns.get(purpose)
    if wanted is not None:
        if not has_column(table, wanted):
            raise table.error(
                f"has no column {wanted!r} (columns.{purpose}){_those_there_are(table, wanted)}"
            )
        return wanted
    return next((name for name in usual if has_column(table, name)), None)


def need_column(table: Table, purpose: str, columns: Mapping[str, str], usual: Sequence[str]) -> str:
    """Like :func:`find_column`, but a table without one is refused."""
    column = find_column(table, purpose, columns, usual)
    if column is None:
        named = " or ".join(repr(name) for name in usual)
        fix = f"say which it is with columns: {{{purpose}: NAME}}"
        if table.option.startswith("--"):  # the command line has no option for that
            fix = f"rename the column that holds the {purpose}"
        raise table.error(f"has no column {named}{_those_there_are(table, usual[0])}; {fix}")
    return column


def has_column(table: Table, column: str) -> bool:
    """Whether any row has it."""
    return any(value_of(row, column) is not ABSENT for row in table.rows)


def value_of(row: Row, column: str) -> Any:
    """The value, :data:`ABSENT` if the row has no such column. A name with dots as it stands goes first."""
    if column in row.values:
        return row.values[column]
    value: Any = row.values
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdecimal():
            if int(part) >= len(value):
                return ABSENT
            value = value[int(part)]
        else:
            return ABSENT
    return value


def is_missing(value: Any) -> bool:
    """Null, not a number (how tables write null) or blank text."""
    if value is None or value is ABSENT:
        return True
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, str) and not value.strip()


def as_text(table: Table, row: Row, column: str) -> str | None:
    """Text as it stands, a number as Python writes it, None if missing; anything else is refused."""
    value = value_of(row, column)
    if is_missing(value):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise table.error(f"column {column!r} holds a {type(value).__name__}, must be text or a number", row)


def column_names(table: Table) -> list[str]:
    """All columns, nested ones with dots, in the order they first occur."""
    names: dict[str, None] = {}
    for row in table.rows[:_LOOK_AT]:
        names.update(dict.fromkeys(_names(row.values, "")))
    return list(names)


def _names(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{key}.")


def _those_there_are(table: Table, wanted: str) -> str:
    names = column_names(table)
    near = get_close_matches(wanted, names, n=1)
    return f"; it has {', '.join(names) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands: the line of a JSONL file, else its number, both counted from 1."""

    number: int
    values: Mapping[str, Any]


def read_rows(path: Path) -> list[Row]:
    """All rows of a file; what it is is decided by its suffix. Errors name the file and the line."""
    try:
        return list(READERS[path.suffix.lower()](path))
    except UnicodeDecodeError as error:
        raise TaskError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise TaskError(f"{path} cannot be read: {error}") from error


def _read_jsonl(path: Path) -> Iterator[Row]:
    # utf-8-sig: a byte order mark, as some editors write, is no part of the first line
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
            yield Row(number, _mapping(values, f"{path}:{number}"))


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
        yield Row(number, _mapping(values, f"{path}, row {number}"))


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
                if None in values:  # DictReader's key for what has no column
                    raise TaskError(
                        f"{path}:{reader.line_num}: more fields than the first line has columns "
                        f"({len(reader.fieldnames or ())}); put fields that hold commas in double quotes"
                    )
                yield Row(number, dict(values))
        except csv.Error as error:
            # line_num counts whole lines read: the broken one comes after them
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


def _mapping(values: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(values, dict):
        raise TaskError(f"{place}: must be an object with named columns, not {type(values).__name__}")
    return values


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


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
