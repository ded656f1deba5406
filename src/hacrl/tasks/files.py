"""Rows of local files: JSONL, JSON and CSV with the standard library, Parquet with pyarrow."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.optional import optional_module


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
