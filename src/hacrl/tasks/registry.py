"""Tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches

from hacrl.errors import TaskError
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.base import Task
from hacrl.tasks.settings import TaskSettings

TASKS: dict[str, Callable[..., Task]] = {"arithmetic": ArithmeticTask}


def make_task(settings: TaskSettings) -> Task:
    """Build the named task with its options; unknown names and options are refused."""
    if settings.name not in TASKS:
        raise TaskError(f"task.name: there is no task {settings.name!r}; there are {', '.join(TASKS)}")
    factory = TASKS[settings.name]
    known = list(inspect.signature(factory).parameters)
    for option in settings.options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TaskError(f"task.options.{option}: unknown option of task {settings.name!r}{hint}")
    try:
        return factory(**settings.options)
    except TaskError as error:
        raise TaskError(f"task.options.{error}") from error
    except (TypeError, ValueError) as error:  # an option of the wrong type
        raise TaskError(
            f"task.options: {settings.options} do not fit task {settings.name!r}: {error}"
        ) from error
