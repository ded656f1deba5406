"""Find the columns of a data set that hold the problem, the answer and the id, and read their values.

A column name may reach into nested values with dots: ``meta.gold``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.data import Row, Table

ABSENT: Any = object()  # the row has no such column; None means that the value is missing
_ROWS_SCANNED = 1000  # rows whose column names an error message lists


def check_columns(
    columns: Mapping[str, str] | None, purposes: Sequence[str], option: str = "columns"
) -> Mapping[str, str]:
    """Return the user's ``columns`` option. Raise TaskError if a purpose or a column name is invalid."""
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


def merge_columns(table: Table, columns: Mapping[str, str], purposes: Sequence[str]) -> Mapping[str, str]:
    """Return the task's column names, overridden by those that the data source itself gives."""
    return {**columns, **check_columns(table.columns, purposes, f"{table.option}.columns")}


def find_column(
    table: Table, purpose: str, columns: Mapping[str, str], defaults: Sequence[str] = ()
) -> str | None:
    """Return the column that the user named, else the first default that the table has, else None."""
    named = columns.get(purpose)
    if named is not None:
        if not has_column(table, named):
            option = f"--columns {purpose}=..." if table.option == "--on" else f"columns.{purpose}"
            raise table.error(f"has no column {named!r} ({option}){_existing_columns(table, named)}")
        return named
    return next((name for name in defaults if has_column(table, name)), None)


def require_column(table: Table, purpose: str, columns: Mapping[str, str], defaults: Sequence[str]) -> str:
    """Like :func:`find_column`, but raise TaskError if the table has no such column."""
    column = find_column(table, purpose, columns, defaults)
    if column is None:
        expected = " or ".join(repr(name) for name in defaults)
        fix = f"name it with columns: {{{purpose}: NAME}}"
        if table.option == "--on":
            fix = f"name it with --columns {purpose}=NAME"
        elif table.option.startswith("--"):  # a benchmark's own file
            fix = f"rename the column that holds the {purpose}"
        raise table.error(f"has no column {expected}{_existing_columns(table, defaults[0])}; {fix}")
    return column


def has_column(table: Table, column: str) -> bool:
    """Return whether any row has the column."""
    return any(value_of(row, column) is not ABSENT for row in table.rows)


def value_of(row: Row, column: str) -> Any:
    """Return the row's value, or :data:`ABSENT`. A column whose own name contains dots takes precedence."""
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
    """Return whether a value is null, NaN (how tables write null) or blank text."""
    if value is None or value is ABSENT:
        return True
    if isinstance(value, float):
        return math.isnan(value)
    return isinstance(value, str) and not value.strip()


def as_text(table: Table, row: Row, column: str) -> str | None:
    """Return text unchanged, a number as Python prints it, and None if missing; refuse other types."""
    value = value_of(row, column)
    if is_missing(value):
        return None
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise table.error(f"column {column!r} holds a {type(value).__name__}, must be text or a number", row)


def column_names(table: Table) -> list[str]:
    """Return all column names, nested ones with dots, in the order of first occurrence."""
    names: dict[str, None] = {}
    for row in table.rows[:_ROWS_SCANNED]:
        names.update(dict.fromkeys(_dotted_names(row.values, "")))
    return list(names)


def _dotted_names(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted_names(value, f"{prefix}{key}.")


def _existing_columns(table: Table, wanted: str) -> str:
    """The part of an error message that lists the table's columns and the nearest match."""
    names = column_names(table)
    near = get_close_matches(wanted, names, n=1)
    return f"; it has {', '.join(names) or 'none'}" + (f"; did you mean {near[0]!r}?" if near else "")
