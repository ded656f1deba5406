"""An event loop in a thread of its own, so that ``async`` functions can be called from plain code.

One reward function with TRL's signature: found by name, called with what it takes, its values checked.

Rows of a data set into the problems of a ``reward`` task.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from hacrl.errors import TaskError
from hacrl.json_values import is_plain_json
from hacrl.plugins import is_reference, load_reference
from hacrl.tasks.data import Row, Table, as_text, merge_columns, find_column, is_missing, require_column, value_of
from hacrl.tasks.splits import Candidate, question_hash
from hacrl.types import Problem, Role, Turn


class LoopThread:
    """Runs coroutines side by side, all in one loop: clients and locks that belong to it stay valid.

    Its own thread, because a notebook already has a running loop in the main one.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._runner: asyncio.Runner | None = None

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Their results, in order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hacrl-rewards")
            self._runner = asyncio.Runner()
        assert self._runner is not None
        return self._thread.submit(self._runner.run, _all(coroutines)).result()

    def close(self) -> None:
        """Close the loop and end the thread; a later call starts new ones."""
        if self._thread is not None and self._runner is not None:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
            self._thread = self._runner = None


async def _all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


RewardFunction = Callable[..., Any]


class NamedFunction:
    """A reward function and the name that messages give it."""

    def __init__(self, given: str | RewardFunction) -> None:
        self.function: RewardFunction = load_function(given) if isinstance(given, str) else given
        self.name = given if isinstance(given, str) else _name_of(given)
        if not callable(self.function):
            raise TaskError(f"functions: {self.name!r} is not callable; give a function")
        if inspect.isclass(self.function):
            raise TaskError(f"functions: {self.name!r} is a class; give a function, or an instance of it")
        try:
            self._parameters: list[inspect.Parameter] | None = list(
                inspect.signature(self.function).parameters.values()
            )
        except (TypeError, ValueError):
            self._parameters = None  # some built-in callables do not tell: then all is passed

    def start(self, arguments: Mapping[str, Any], extras: Mapping[str, Any]) -> Any:
        """Call it with those arguments it takes. Its values, or for an ``async`` function an awaitable.

        ``extras`` go only to functions that name them; ``arguments`` also to those with ``**kwargs``.
        """
        taken = self._taken(arguments, extras)
        try:
            return self.function(**taken)
        except (Exception, SystemExit) as error:  # exit() in a function must not end a run without a word
            raise self.raised(error) from error

    def raised(self, error: BaseException) -> TaskError:
        """The error for a function that raised."""
        return self.error(f"raised {type(error).__name__}: {error}{_place_in(self.function, error)}")

    def error(self, message: str) -> TaskError:
        """An error that names this function."""
        return TaskError(f"reward function {self.name!r} {message}")

    def checked(self, values: Any, count: int) -> list[float | None]:
        """One finite number or None per response; anything else is refused."""
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            raise self.error(
                f"returned {type(values).__name__}; it must return a list with one number per completion"
            )
        listed = list(values)
        if len(listed) != count:
            raise self.error(
                f"returned {len(listed)} values for {count} completions; it must return one each"
            )
        return [self._number(value, index) for index, value in enumerate(listed)]

    def _number(self, value: Any, index: int) -> float | None:
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, str | bytes) else None
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch, for a tensor of several values
            number = None
        if number is None:
            raise self.error(
                f"returned {value!r} for completion {index}, which is not a number (None: does not apply)"
            )
        if not math.isfinite(number):
            raise self.error(f"returned {number} for completion {index}; rewards must be finite")
        return number

    def _taken(self, arguments: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        if self._parameters is None:
            return dict(arguments)
        there = {**extras, **arguments}
        named = [one for one in self._parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        lacking = [one.name for one in named if one.default is one.empty and one.name not in there]
        lacking += [one.name for one in self._parameters if one.kind is one.POSITIONAL_ONLY]
        if lacking:
            near = get_close_matches(lacking[0], there, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise self.error(
                f"wants {lacking[0]!r}, which is no column of the data; by keyword it can have "
                f"{', '.join(arguments)}{hint}"
            )
        if any(one.kind is one.VAR_KEYWORD for one in self._parameters):
            return {**{one.name: extras[one.name] for one in named if one.name in extras}, **arguments}
        return {one.name: there[one.name] for one in named if one.name in there}


def load_function(reference: str) -> RewardFunction:
    """Import the function ``package.module:name`` or ``path/to/file.py:name``."""
    if not is_reference(reference):
        raise TaskError(
            f"functions: {reference!r} must be package.module:function or path/to/file.py:function"
        )
    function: RewardFunction = load_reference(reference, "functions", TaskError)
    return function


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _place_in(function: Any, error: BaseException) -> str:
    """`` (rewards.py, line 7)``: where in the user's own file it happened, as a traceback would say."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


async def outcome_of(awaitable: Awaitable[Any]) -> Any:
    """What an ``async`` function returned, or the exception it raised, as a value."""
    try:
        return await awaitable
    except (Exception, SystemExit) as error:
        return error


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
        columns = merge_columns(table, self._columns, PURPOSES)
        prompt_column = require_column(table, "prompt", columns, ("prompt",))
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
