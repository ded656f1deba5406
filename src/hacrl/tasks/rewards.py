"""The ``reward`` task: any prompts, judged by Python reward functions with TRL's signature."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast, get_args

from hacrl.errors import TaskError
from hacrl.json_values import is_plain_json
from hacrl.tasks.columns import (
    as_text,
    check_columns,
    find_column,
    is_missing,
    merge_columns,
    require_column,
    value_of,
)
from hacrl.tasks.data import DataOption, Row, Table, load_table
from hacrl.tasks.reward_functions import RewardFunction, RewardFunctions
from hacrl.tasks.reward_log import RewardLog
from hacrl.tasks.splits import Candidate, check_count, check_test_share, make_splits, question_hash
from hacrl.tasks.verdicts import shown_problem, why_unusable
from hacrl.types import Problem, Role, Rollout, Turn, Verdict

PURPOSES = ("prompt", "answer")  # of columns
_SELF_TEST_RESPONSES = (r"The answer is \boxed{0}.", "")
# Arguments of every reward function: no column may have such a name.
_RESERVED = frozenset(("prompts", "completions", "trainer_state", "log_metric", "log_extra"))
# Columns that TRL does not pass to reward functions.
_NOT_PASSED = frozenset(("completion", "completion_ids"))


class RewardTask:
    """Prompts from a data set, and functions that give each response a number.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns)`` with one entry
    per response. It returns one number per response, or None where it does not apply. The reward is the
    weighted sum over the functions. A reward outside ``reward_range`` is an error.
    """

    def __init__(
        self,
        *,
        functions: str | RewardFunction | Sequence[str | RewardFunction],
        train: DataOption,
        test: DataOption | None = None,
        test_share: float | None = None,
        weights: Sequence[float] | None = None,
        columns: Mapping[str, str] | None = None,
        reward_range: Sequence[float] | None = None,
        limit: int | None = None,
        name: str = "reward",
    ) -> None:
        self.name = name
        self.trainer_state: Any = None  # a run sets its own
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not listed:
            raise TaskError("functions: give at least one")
        self._functions = RewardFunctions(listed)
        self._weights = _checked_weights(weights, len(listed))
        self._range = _checked_range(reward_range)
        self.max_reward: float | None = None if self._range is None else self._range[1]
        share = check_test_share(test_share, test, default=0.0)
        check_count("limit", limit)
        reader = _RowReader(check_columns(columns, PURPOSES))
        candidates = reader.candidates(load_table("train", train))
        held_out = None if test is None else reader.candidates(load_table("test", test))
        self._conversational = bool(reader.conversational)
        self._python_columns = reader.python_columns
        splits = make_splits(candidates, held_out, test_share=share, limit=limit)
        self._train, self._test, self.notes = splits.train, splits.test, splits.notes

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order; empty without ``test`` or ``test_share``."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return the reward of every response. Raise TaskError only if a reward function fails."""
        if not rollouts:
            return []
        problems = [rollout.problem for rollout in rollouts]
        return self._verdicts(
            problems,
            [rollout.text for rollout in rollouts],
            [list(rollout.token_ids) for rollout in rollouts],
        )

    def self_test(self) -> None:
        """Call every function once with two made-up completions, to find a broken one before models load."""
        problems = [self._train[0], self._train[min(1, len(self._train) - 1)]]
        self._verdicts(problems, list(_SELF_TEST_RESPONSES), [[0, 1, 2], []])

    def close(self) -> None:
        """End the thread that awaits ``async`` functions, if there is one."""
        self._functions.close()

    def _verdicts(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[Verdict]:
        log = RewardLog(len(problems))
        arguments = {**self._arguments(problems, texts, token_ids), **log.arguments}
        extras = {"completions_ids": token_ids}  # its name in TRL's documentation, not in its code
        values_per_function = self._functions.call(arguments, extras, problems)
        metrics = log.metrics
        return [
            Verdict(
                self._total(values, problem),
                "scored",
                dict(zip(self._functions.short_names, values, strict=True)),
                log.columns_of(i),
                metrics,
            )
            for i, (problem, values) in enumerate(
                zip(problems, zip(*values_per_function, strict=True), strict=True)
            )
        ]

    def _arguments(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        rows = [self._python_columns.get(problem.id, problem.fields) for problem in problems]
        columns = dict.fromkeys(key for row in rows for key in row)
        return {
            "prompts": [self._prompt(problem) for problem in problems],
            "completions": [self._completion(text) for text in texts],
            "completion_ids": token_ids,
            **{key: [row.get(key) for row in rows] for key in columns},
            "trainer_state": self.trainer_state,
        }

    def _prompt(self, problem: Problem) -> str | list[dict[str, str]]:
        if not self._conversational:
            return problem.prompt
        turns = (*problem.context, Turn("user", problem.prompt))
        return [{"role": turn.role, "content": turn.content} for turn in turns]

    def _completion(self, text: str) -> str | list[dict[str, str]]:
        return [{"role": "assistant", "content": text}] if self._conversational else text

    def _total(self, values: Sequence[float | None], problem: Problem) -> float:
        names = ", ".join(self._functions.names)
        if all(value is None for value in values):
            raise TaskError(
                f"reward functions {names} all returned None for the same response to "
                f"{shown_problem(problem)}; at least one must give it a number"
            )
        total = sum(
            weight * value for weight, value in zip(self._weights, values, strict=True) if value is not None
        )
        if (why := why_unusable(total)) is not None:
            raise TaskError(
                f"reward functions {names} with weights {self._weights} gave {total:g} for a response to "
                f"{shown_problem(problem)}; {why}"
            )
        if self._range is not None:
            low, high = self._range
            if not low - 1e-6 <= total <= high + 1e-6:  # rounding of the weighted sum
                raise TaskError(
                    f"reward_range={[low, high]}: the reward functions gave {total} for a response to "
                    f"{shown_problem(problem)}; widen the range, or correct the functions"
                )
        return total


class _RowReader:
    """Turns rows into candidates. Prompts must be all text or all conversations."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.conversational: bool | None = None
        # problem id -> columns of a row that has values which JSON cannot hold
        self.python_columns: dict[str, Mapping[str, Any]] = {}
        self._columns = columns

    def candidates(self, table: Table) -> list[Candidate]:
        """Return every row as a candidate, with all columns that are plain JSON, except the prompt.

        Columns with other values, such as objects, are kept in ``python_columns``.
        """
        columns = merge_columns(table, self._columns, PURPOSES)
        prompt_column = require_column(table, "prompt", columns, ("prompt",))
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
            question = "\x1f".join(f"{turn.role}: {turn.content}" for turn in turns)
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


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, list | tuple) or len(weights) != count:
        raise TaskError(f"weights={weights!r}: give {count}, one for each of functions")
    return [_finite("weights", weights, weight) for weight in weights]


def _checked_range(reward_range: Sequence[float] | None) -> tuple[float, float] | None:
    if reward_range is None:
        return None
    if not isinstance(reward_range, list | tuple) or len(reward_range) != 2:
        raise TaskError(f"reward_range={reward_range!r}: give two numbers, [smallest, largest]")
    low, high = (_finite("reward_range", reward_range, end) for end in reward_range)
    if not low < high:
        raise TaskError(f"reward_range={reward_range!r}: the first must be smaller than the second")
    return low, high


def _finite(option: str, given: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TaskError(f"{option}={given!r}: {value!r} is not a finite number")
    return float(value)
