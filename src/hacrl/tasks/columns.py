"""Which column of a data set holds what. Dotted names reach into nested ones: ``meta.gold``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.files import Row
from hacrl.tasks.sources import Table

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
