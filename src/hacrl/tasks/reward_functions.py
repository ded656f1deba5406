"""Call reward functions with the signature that TRL's trainers use, plain or ``async``."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

from hacrl.config.values import shown
from hacrl.errors import TaskError
from hacrl.plugins import is_reference, load_reference
from hacrl.tasks.verdicts import as_number, shown_problem, why_unusable
from hacrl.types import Problem

RewardFunction = Callable[..., Any]


class RewardFunctions:
    """Several reward functions that are called together; ``async`` ones run concurrently."""

    def __init__(self, functions: Sequence[str | RewardFunction]) -> None:
        self._functions = [NamedFunction(function) for function in functions]
        self._loop = EventLoopThread()

    @property
    def names(self) -> list[str]:
        """The functions' names, as messages give them."""
        return [function.name for function in self._functions]

    @cached_property
    def short_names(self) -> list[str]:
        """The functions' names without modules, as metrics give them: each once, with a number if needed."""
        found: list[str] = []
        for function in self._functions:
            base = _name_of(function.function).strip("<>")
            numbered = (base if i == 1 else f"{base}_{i}" for i in count(1))
            found.append(next(name for name in numbered if name not in found))
        return found

    def call(
        self, arguments: Mapping[str, Any], extras: Mapping[str, Any], problems: Sequence[Problem]
    ) -> list[list[float | None]]:
        """Return each function's values: one finite number or None for each response to the ``problems``.

        ``arguments`` go to functions that name them or take ``**kwargs``, ``extras`` only to the former.
        """
        results: list[Any] = []
        try:
            for function in self._functions:
                results.append(function.call(arguments, extras))
        except TaskError:
            for result in results:
                if inspect.iscoroutine(result):
                    result.close()  # otherwise Python warns that it was never awaited
            raise
        pending = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if pending:
            outcomes = self._loop.gather([_result_or_error(results[index]) for index in pending])
            for index, outcome in zip(pending, outcomes, strict=True):
                if isinstance(outcome, (Exception, SystemExit)):
                    raise self._functions[index].failure(outcome) from outcome
                results[index] = outcome
        return [
            function.check(values, problems)
            for function, values in zip(self._functions, results, strict=True)
        ]

    def close(self) -> None:
        """End the thread that runs ``async`` functions, if there is one."""
        self._loop.close()


class NamedFunction:
    """A reward function, and the name that messages use for it."""

    def __init__(self, given: str | RewardFunction) -> None:
        self.function: RewardFunction = load_function(given) if isinstance(given, str) else given
        self.name = given if isinstance(given, str) else _name_of(given)
        if not callable(self.function):
            raise TaskError(f"functions: {self.name!r} is not callable; give a function")
        if inspect.isclass(self.function):
            raise TaskError(f"functions: {self.name!r} is a class; give a function, or an instance of it")
        if hasattr(self.function, "forward") and hasattr(self.function, "parameters"):
            raise TaskError(
                f"functions: {self.name!r} is a model; give a function that calls it and returns a number "
                "per completion"
            )
        try:
            self._parameters: list[inspect.Parameter] | None = list(
                inspect.signature(self.function).parameters.values()
            )
        except (TypeError, ValueError):
            self._parameters = None  # some built-ins have no signature: pass them everything

    def call(self, arguments: Mapping[str, Any], extras: Mapping[str, Any]) -> Any:
        """Call the function with the arguments that it takes. Return its values or its awaitable.

        The arguments are the function's own copies: what it edits is seen by no other call.
        """
        accepted = {name: own_copy(value) for name, value in self._accepted(arguments, extras).items()}
        try:
            return self.function(**accepted)
        except (Exception, SystemExit) as error:  # exit() in a function must not end a run silently
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> TaskError:
        """Return the error that reports what the function raised."""
        return self.error(f"raised {type(error).__name__}: {error}{_location(self.function, error)}")

    def error(self, message: str) -> TaskError:
        """Return an error that names this function."""
        return TaskError(f"reward function {self.name!r} {message}")

    def check(self, values: Any, problems: Sequence[Problem]) -> list[float | None]:
        """Return one finite number or None per response. Raise TaskError for anything else."""
        if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
            raise self.error(
                f"returned {type(values).__name__}; it must return a list with one number per completion"
            )
        try:
            listed = list(islice(values, len(problems) + 1))
        except (Exception, SystemExit) as error:  # of a generator
            raise self.failure(error) from error
        if len(listed) != len(problems):
            given = len(values) if isinstance(values, Sized) else len(listed)
            more = "at least " if given == len(listed) > len(problems) else ""
            raise self.error(
                f"returned {more}{given} values for {len(problems)} completions; it must return one each"
            )
        return [
            self._number(value, index, problem)
            for index, (value, problem) in enumerate(zip(listed, problems, strict=True))
        ]

    def _number(self, value: Any, index: int, problem: Problem) -> float | None:
        if value is None:
            return None
        number = as_number(value)
        returned = f"returned {shown(value)} for completion {index} of {shown_problem(problem)}"
        if number is None:
            raise self.error(f"{returned}, which is neither a number nor None")
        if (why := why_unusable(number)) is not None:
            hint = " (None: the function does not apply)" if math.isnan(number) else ""
            raise self.error(f"{returned}; {why}{hint}")
        return number

    def _accepted(self, arguments: Mapping[str, Any], extras: Mapping[str, Any]) -> dict[str, Any]:
        if self._parameters is None:
            return dict(arguments)
        available = {**extras, **arguments}
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        named = [parameter for parameter in self._parameters if parameter.kind in kinds]
        missing = [
            parameter.name
            for parameter in named
            if parameter.default is parameter.empty and parameter.name not in available
        ]
        missing += [
            parameter.name for parameter in self._parameters if parameter.kind is parameter.POSITIONAL_ONLY
        ]
        if missing:
            near = get_close_matches(missing[0], available, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise self.error(
                f"takes {missing[0]!r}, which is not a column of the data; the keyword arguments are "
                f"{', '.join(arguments)}{hint}"
            )
        names = [parameter.name for parameter in named]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters):
            return {**{name: extras[name] for name in names if name in extras}, **arguments}
        return {name: available[name] for name in names if name in available}


def own_copy(value: Any) -> Any:
    """Return the value with new lists, dicts and sets at every level.

    Other objects stay the same objects: they are the user's, and some cannot be copied or are meant to be
    shared.
    """
    kind = type(value)
    if kind is list:
        return [own_copy(item) for item in value]
    if kind is dict:
        return {key: own_copy(item) for key, item in value.items()}
    if kind is tuple:
        return tuple(own_copy(item) for item in value)
    return set(value) if kind is set else value


def load_function(reference: str) -> RewardFunction:
    """Import the function that ``package.module:name`` or ``path/to/file.py:name`` names."""
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


def _location(function: Any, error: BaseException) -> str:
    """Return `` (rewards.py, line 7)``, the position in the user's own file where the error was raised."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


class EventLoopThread:
    """One event loop for all calls, in a thread of its own.

    One loop, because HTTP clients and locks belong to the loop that created them. Its own thread, because a
    notebook already runs a loop in the main thread.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._runner: asyncio.Runner | None = None

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run the coroutines concurrently and return their results in order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hacrl-rewards")
            self._runner = asyncio.Runner()
        assert self._runner is not None
        return self._thread.submit(self._runner.run, _gather(coroutines)).result()

    def close(self) -> None:
        """Close the loop and end the thread; a later call starts new ones."""
        if self._thread is not None and self._runner is not None:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
            self._thread = self._runner = None


async def _gather(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


async def _result_or_error(awaitable: Awaitable[Any]) -> Any:
    """Return what an ``async`` function returned, or the exception that it raised."""
    try:
        return await awaitable
    except (Exception, SystemExit) as error:
        return error
