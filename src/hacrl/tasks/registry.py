"""Make the task that a recipe names: built in, a preset, of reasoning-gym, or the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from hacrl.config.schema import TaskSettings
from hacrl.errors import TaskError
from hacrl.plugins import installed_plugins, is_reference, load_reference
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.base import REQUIRED_MEMBERS, Task
from hacrl.tasks.boxed import PRESETS

GYM_PREFIX = "gym:"
ENTRY_POINTS = "hacrl.tasks"  # group under which installed packages offer tasks


@dataclass(frozen=True)
class LazyTask:
    """A task class whose module is imported on first use."""

    module: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults of a preset; the user's options win

    def load(self) -> Callable[..., Task]:
        """Import and return the task's class."""
        factory: Callable[..., Task] = getattr(import_module(self.module), self.name)
        return factory


_BOXED = "hacrl.tasks.boxed"
TASKS: dict[str, Callable[..., Task] | LazyTask] = {
    "arithmetic": ArithmeticTask,
    "boxed": LazyTask(_BOXED, "BoxedTask"),
    **{name: LazyTask(_BOXED, "BoxedTask", {**preset, "name": name}) for name, preset in PRESETS.items()},
    "reward": LazyTask("hacrl.tasks.rewards", "RewardTask"),
}
_SET_BY_REGISTRY = ("name", "verifier")  # parameters that are no options of the user


def make_task(settings: TaskSettings) -> Task:
    """Return the named task, built with its options. Raise TaskError for unknown names and options."""
    factory, options = _find(settings.name)
    if not callable(factory):
        raise TaskError(f"task.name: {settings.name!r} must be a class or function that returns a task")
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in _SET_BY_REGISTRY]
    for option in settings.options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TaskError(f"task.options.{option}: unknown option of task {settings.name!r}{hint}")
    options = {**options, **settings.options}
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise TaskError(f"task.options.{name}: missing; task {settings.name!r} needs it")
    if "verifier" in parameters:
        options["verifier"] = settings.verifier
    try:
        return _with_required_members(settings.name, factory(**options))
    except TaskError as error:
        message = str(error)
        raise TaskError(message if message.startswith("task") else f"task.options.{message}") from error
    except (TypeError, ValueError) as error:  # an option of the wrong type
        raise TaskError(
            f"task.options: {settings.options} do not fit task {settings.name!r}: {error}"
        ) from error


def _with_required_members(name: str, task: Task) -> Task:
    missing = [member for member in REQUIRED_MEMBERS if not hasattr(task, member)]
    if missing:
        raise TaskError(
            f"task.name: what {name!r} returns is not a task: it has no {', '.join(missing)} "
            "(docs/extending.md)"
        )
    return task


def _find(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    """Return the task's class and the options that its name implies."""
    if name.startswith(GYM_PREFIX):
        from hacrl.tasks.gym.task import GymTask

        return functools.partial(GymTask, name.removeprefix(GYM_PREFIX)), {}
    if is_reference(name):
        return load_reference(name, "task.name", TaskError), {}
    plugins = {} if name in TASKS else installed_plugins(ENTRY_POINTS)
    if name in plugins:
        return load_reference(plugins[name], "task.name", TaskError), {}
    if name not in TASKS:
        names = [*TASKS, *plugins, f"{GYM_PREFIX}NAME", "package.module:Task", "file.py:Task"]
        near = get_close_matches(name, [*TASKS, *plugins], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TaskError(f"task.name: there is no task {name!r}{hint}; there are {', '.join(names)}")
    found = TASKS[name]
    if isinstance(found, LazyTask):
        return found.load(), dict(found.options)
    return found, {}
