"""Rows of a data set into the problems of a ``reward`` task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from hacrl.json_values import is_plain_json
from hacrl.tasks.columns import as_text, columns_of, find_column, is_missing, need_column, value_of
from hacrl.tasks.files import Row
from hacrl.tasks.sources import Table
from hacrl.tasks.splits import Candidate, question_hash
from hacrl.types import Problem, Role, Turn

PURPOSES = ("prompt", "answer")
# Passed by the trainer itself; TRL leaves columns of the second group out as well.
_OWN = frozenset(("prompts", "completions", "trainer_state"))
_DROPPED = frozenset(("completion", "completion_ids"))


class PromptReader:
    """Rows into candidates; prompts are all text or all conversations."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.conversational: bool | None = None
        # problem id -> the row's columns, of rows with values that JSON cannot hold
        self.python_columns: dict[str, Mapping[str, Any]] = {}
        self._columns = columns

    def candidates(self, table: Table) -> list[Candidate]:
        """Return every row as a candidate, with all columns but the prompt that are plain JSON.

        Columns with other values, such as objects, are kept in ``python_columns``.
        """
        columns = columns_of(table, self._columns, PURPOSES)
        prompt_column = need_column(table, "prompt", columns, ("prompt",))
        answer_column = find_column(table, "answer", columns)
        names = dict.fromkeys(key for row in table.rows for key in row.values)
        clash = _OWN & names.keys()
        if clash:
            raise table.error(
                f"a column is called {min(clash)!r}, as is an argument of every reward function; rename it"
            )
        kept = [name for name in names if name not in _DROPPED and name != "prompt"]
        found = []
        for row in table.rows:
            turns = self._turns(table, row, prompt_column)
            fields = {name: row.values.get(name) for name in kept}
            # Rows that ask the same and differ in other columns are judged otherwise: all are kept.
            variant = json.dumps(fields, sort_keys=True, default=partial(_stable_text, row.number))
            question = "\x1f".join(f"{turn.role}: {turn.content}" for turn in turns)
            own_id = f"{question_hash(question, variant) >> 192:016x}"
            answer = (
                as_text(table, row, answer_column) if answer_column else _plain(row.values.get("answer"))
            ) or ""
            plain = {name: value for name, value in fields.items() if is_plain_json(value)}
            if len(plain) < len(fields):
                self.python_columns[own_id] = fields
            problem = Problem(own_id, turns[-1].content, answer, turns[:-1], plain)
            found.append(Candidate(question, problem, variant))
        return found

    def _turns(self, table: Table, row: Row, column: str) -> tuple[Turn, ...]:
        value = value_of(row, column)
        if is_missing(value):
            raise table.error(f"column {column!r} is empty; every row needs a prompt", row)
        conversational = not isinstance(value, str)
        if self.conversational not in (None, conversational):
            raise table.error("prompts must be all text or all lists of messages, not both", row)
        self.conversational = conversational
        if isinstance(value, str):
            return (Turn("user", value),)
        if not isinstance(value, Sequence) or not value or not all(_is_message(one) for one in value):
            raise table.error(
                f"column {column!r} must be text or a list of messages {{role: system, user or assistant, "
                "content: TEXT}",
                row,
            )
        turns = tuple(Turn(cast(Role, one["role"]), one["content"]) for one in value)
        if turns[-1].role != "user":
            raise table.error(f"the last message of column {column!r} must be the user's", row)
        return turns


def _stable_text(row: int, value: Any) -> str:
    """A value that JSON does not know, as text that is the same in every process.

    What Python writes may hold an address or follow the order of hashes: then the row's number stands for it.
    """
    written = repr(value)
    return f"row {row}" if isinstance(value, set | frozenset) or " at 0x" in written else written


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("role") in get_args(Role)
        and isinstance(value.get("content"), str)
    )


def _plain(value: Any) -> str:
    """An answer for logs only: text and numbers, else nothing."""
    return str(value) if isinstance(value, str | int | float) else ""
