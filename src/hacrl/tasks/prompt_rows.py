"""Read prompts and further columns of a data set that Python code judges: reward functions, environments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from hacrl.json_values import is_plain_json
from hacrl.tasks.columns import (
    as_text,
    find_column,
    is_missing,
    merge_columns,
    require_column,
    value_of,
)
from hacrl.tasks.data import Row, Table
from hacrl.tasks.splits import Candidate, question_hash
from hacrl.types import Problem, Role, Turn

PURPOSES = ("prompt", "answer")  # of columns
# Arguments of every reward function: no column may have such a name.
_RESERVED = frozenset(("prompts", "completions", "trainer_state", "log_metric", "log_extra"))
# Columns that TRL does not pass to reward functions.
_NOT_PASSED = frozenset(("completion", "completion_ids"))


class PromptReader:
    """Turns rows into candidates. Prompts must be all text or all conversations.

    Without ``needs_prompt``, rows may have no prompt; it is empty then.
    """

    def __init__(self, columns: Mapping[str, str], needs_prompt: bool = True) -> None:
        self._needs_prompt = needs_prompt
        self.conversational: bool | None = None
        # problem id -> columns of a row that has values which JSON cannot hold
        self.python_columns: dict[str, Mapping[str, Any]] = {}
        self._columns = columns

    def candidates(self, table: Table) -> list[Candidate]:
        """Return every row as a candidate, with all columns that are plain JSON, except the prompt.

        Columns with other values, such as objects, are kept in ``python_columns``.
        """
        columns = merge_columns(table, self._columns, PURPOSES)
        if self._needs_prompt:
            prompt_column: str | None = require_column(table, "prompt", columns, ("prompt",))
        else:
            prompt_column = find_column(table, "prompt", columns, ("prompt",))
        answer_column = find_column(table, "answer", columns)
        names = dict.fromkeys(key for row in table.rows for key in row.values)
        clash = _RESERVED & names.keys()
        if clash:
            raise table.error(
                f"column {min(clash)!r} has the name of an argument of every reward function; rename it"
            )
        kept = [name for name in names if name not in _NOT_PASSED and name != "prompt"]
        found = []
        for row in table.rows:
            turns = self._turns(table, row, prompt_column)
            fields = {name: row.values.get(name) for name in kept}
            # Rows with equal prompts and different other columns are judged differently: keep all of them.
            variant = json.dumps(fields, sort_keys=True, default=partial(_stable_text, row.number))
            has_prompt = len(turns) > 1 or turns[0].content
            question = "\x1f".join(f"{turn.role}: {turn.content}" for turn in turns) if has_prompt else ""
            own_id = f"{question_hash(question, variant) >> 192:016x}"
            answer = (
                as_text(table, row, answer_column) if answer_column else _loggable(row.values.get("answer"))
            ) or ""
            plain = {name: value for name, value in fields.items() if is_plain_json(value)}
            if len(plain) < len(fields):
                self.python_columns[own_id] = fields
            problem = Problem(own_id, turns[-1].content, answer, turns[:-1], plain)
            found.append(Candidate(question, problem, variant))
        return found

    def _turns(self, table: Table, row: Row, column: str | None) -> tuple[Turn, ...]:
        value = None if column is None else value_of(row, column)
        if is_missing(value):
            if not self._needs_prompt:
                return (Turn("user", ""),)
            raise table.error(f"column {column!r} is empty; every row needs a prompt", row)
        conversational = not isinstance(value, str)
        if self.conversational not in (None, conversational):
            raise table.error("prompts must be all text or all lists of messages, not both", row)
        self.conversational = conversational
        if isinstance(value, str):
            return (Turn("user", value),)
        if not isinstance(value, Sequence) or not value or not all(_is_message(message) for message in value):
            raise table.error(
                f"column {column!r} must be text or a list of messages {{role: system, user or assistant, "
                "content: TEXT}",
                row,
            )
        turns = tuple(Turn(cast(Role, message["role"]), message["content"]) for message in value)
        if turns[-1].role != "user":
            raise table.error(f"the last message of column {column!r} must be the user's", row)
        return turns


def _stable_text(row: int, value: Any) -> str:
    """Return text for a value that JSON cannot hold, the same in every process.

    A ``repr`` may contain an address or depend on hash order. Such values are replaced by the row number.
    """
    text = repr(value)
    return f"row {row}" if isinstance(value, set | frozenset) or " at 0x" in text else text


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.get("role") in get_args(Role)
        and isinstance(value.get("content"), str)
    )


def _loggable(value: Any) -> str:
    """Return text and numbers as text, other values as nothing: this answer is only logged."""
    return str(value) if isinstance(value, str | int | float) else ""
