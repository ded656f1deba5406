"""One reward function with TRL's signature: found by name, called with what it takes, its values checked."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hacrl.errors import TaskError
from hacrl.plugins import is_reference, load_reference

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
