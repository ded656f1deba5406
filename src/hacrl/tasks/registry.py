"""Tasks by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from hacrl.config.schema import TaskSettings, VerifierSettings
from hacrl.errors import TaskError
from hacrl.plugins import installed_plugins, is_reference, load_reference
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.base import Task
from hacrl.tasks.boxed import PRESETS

GYM_PREFIX = "gym:"
ENTRY_POINTS = "hacrl.tasks"  # group under which installed packages offer tasks


@dataclass(frozen=True)
class LazyTask:
    """A kind of task whose module is imported when it is first asked for."""

    module: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # what a preset sets; a user's own go first

    def load(self) -> Callable[..., Task]:
        """The task's class."""
        factory: Callable[..., Task] = getattr(import_module(self.module), self.name)
        return factory


_BOXED = "hacrl.tasks.boxed"
TASKS: dict[str, Callable[..., Task] | LazyTask] = {
    "arithmetic": ArithmeticTask,
    "boxed": LazyTask(_BOXED, "BoxedTask"),
    **{name: LazyTask(_BOXED, "BoxedTask", {**preset, "name": name}) for name, preset in PRESETS.items()},
    "reward": LazyTask("hacrl.tasks.rewards", "RewardTask"),
}
_NO_OPTIONS = ("name",)  # given by the registry


def make_task(settings: TaskSettings) -> Task:
    """Build the named task with its options; unknown names and options are refused."""
    factory, options = _find(settings.name)
    if not callable(factory):
        raise TaskError(f"task.name: {settings.name!r} is no class or function that makes a task")
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in _NO_OPTIONS]
    for option in settings.options:
        if option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(known)}"
            raise TaskError(f"task.options.{option}: unknown option of task {settings.name!r}{hint}")
    options = {**options, **settings.options}
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in options:
            raise TaskError(f"task.options.{name}: missing; task {settings.name!r} needs it")
    try:
        if "verifier" in options:
            options["verifier"] = _verifier_settings(options["verifier"])
        return _checked(settings.name, factory(**options))
    except TaskError as error:
        message = str(error)
        raise TaskError(message if message.startswith("task") else f"task.options.{message}") from error
    except (TypeError, ValueError) as error:  # an option of the wrong type
        raise TaskError(
            f"task.options: {settings.options} do not fit task {settings.name!r}: {error}"
        ) from error


def _verifier_settings(options: Any) -> VerifierSettings:
    """Return the limits of the verifier's processes that a recipe gives as ``task.options.verifier``."""
    if not isinstance(options, Mapping):
        raise TaskError(f"verifier: must be a mapping of keys to values, not {options!r}")
    known = [entry.name for entry in fields(VerifierSettings)]
    for key in options:
        if key not in known:
            raise TaskError(f"verifier.{key}: unknown key; it takes {', '.join(known)}")
    try:
        return VerifierSettings(**options)
    except ValueError as error:
        raise TaskError(f"verifier.{error}") from error


def _checked(name: str, task: Task) -> Task:
    missing = [
        part for part in ("name", "max_reward", "train", "test", "verify", "close") if not hasattr(task, part)
    ]
    if missing:
        raise TaskError(
            f"task.name: {name!r} makes no task: it has no {', '.join(missing)} (docs/extending.md)"
        )
    return task


def _find(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    """The task's class, and the options its name stands for."""
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
