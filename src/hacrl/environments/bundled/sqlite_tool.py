"""A database as a tool: SQL queries that can read and nothing else, within limits."""

from __future__ import annotations

import sqlite3
from typing import Any

from hacrl.environments.bundled.answers import OneAnswer
from hacrl.environments.bundled.sqlite_databases import build_database, describe_schema

CHECK_EVERY = 1000  # instructions of SQLite's virtual machine between two calls of the progress handler
LONGEST_QUERY = 4000  # characters
LONGEST_VALUE = 10_000  # bytes of one value, also while a query computes it
HEAP_BYTES = 64 * 2**20  # of SQLite's memory in this process
_ALLOWED = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
# Functions with other results at every call, so that a repeated episode would differ; and a loader of code.
_REFUSED_FUNCTIONS = frozenset(
    "random randomblob load_extension date time datetime julianday strftime unixepoch timediff "  # noqa: SIM905
    "current_date current_time current_timestamp".split()
)


class DatabaseQuestions(OneAnswer):
    """Tools ``query`` and ``submit``; reward 1 if the submitted value equals the row's answer.

    The database is made from the row's ``database`` (a seed) and ``schema`` (its kind), in memory.
    ``instructions`` limits the work of a query: instructions of SQLite's virtual machine, the same number
    everywhere.
    """

    def __init__(self, instructions: int = 5_000_000, rows: int = 50) -> None:
        super().__init__()
        self._instructions = instructions
        self._most_rows = rows
        self._connection: sqlite3.Connection | None = None

    def reset(self, answer: str = "", database: int = 0, schema: str = "shop", **row: Any) -> str:
        """Make the row's database; return its tables, which are added to the prompt."""
        super().reset(answer)
        if self._connection is not None:
            self._connection.close()
        self._connection = build_database(schema, int(database))
        text = "\n" + describe_schema(self._connection)
        restrict(self._connection)
        return text

    def query(self, sql: str) -> str:
        """Run one SQL query on the database and return its rows.

        Args:
            sql: One SELECT statement in SQLite's dialect.

        Returns:
            The column names and the rows, one per line, or an error message.
        """
        assert self._connection is not None
        return run_query(self._connection, str(sql), self._instructions, self._most_rows)


def restrict(connection: sqlite3.Connection) -> None:
    """Make a connection read-only, and limit the size of values and queries.

    The authorizer refuses, when a query is prepared, everything but reading: changes, transactions, PRAGMA,
    ATTACH and functions that load code or give other results at every call.
    """
    connection.execute("PRAGMA query_only = ON")
    connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    for limit, value in (
        (sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * LONGEST_QUERY),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
        (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, value)
    connection.set_authorizer(_authorize)


def run_query(connection: sqlite3.Connection, sql: str, instructions: int, most_rows: int) -> str:
    """Return the rows of a query as text, or what is wrong with it. No query makes this raise."""
    if len(sql) > LONGEST_QUERY:
        return f"Error: the query is longer than {LONGEST_QUERY} characters"
    left = instructions // CHECK_EVERY

    def count() -> bool:
        nonlocal left
        left -= 1
        return left < 0  # True interrupts the query

    connection.set_progress_handler(count, CHECK_EVERY)
    try:
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(most_rows + 1)
    except sqlite3.OperationalError as error:
        if left < 0:
            return "Error: the query takes too long"
        return f"Error: {error}"
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        return f"Error: {error}" if str(error) else f"Error: {type(error).__name__}"
    finally:
        connection.set_progress_handler(None, 0)
    return _table(cursor, rows, most_rows)


def _table(cursor: sqlite3.Cursor, rows: list[tuple[Any, ...]], most_rows: int) -> str:
    cursor.close()
    if not rows:
        return "(no rows)"
    lines = [" | ".join(column[0] for column in cursor.description or ())]
    lines += [" | ".join(_cell(value) for value in row) for row in rows[:most_rows]]
    if len(rows) > most_rows:
        lines.append(f"(only the first {most_rows} rows)")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"(a blob of {len(value)} bytes)"
    return str(value)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _ALLOWED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK
