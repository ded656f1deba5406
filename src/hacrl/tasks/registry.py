"""Make a task by its name: built in, from a package, or a reference to a user's code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from hacrl.config.schema import TaskSettings, VerifierSettings
from hacrl.errors import TaskError
from hacrl.plugins import check_options, load_plugin
from hacrl.tasks.base import REQUIRED_MEMBERS, Task
from hacrl.tasks.boxed import PRESETS

GYM_PREFIX = "gym:"
RETRIES_PREFIX = "gym_retries:"
ENTRY_POINTS = "hacrl.tasks"  # entry point group of tasks in installed packages


TASKS: dict[str, Callable[..., Task] | str] = {
    "arithmetic": "hacrl.tasks.arithmetic:ArithmeticTask",
    "boxed": "hacrl.tasks.boxed:BoxedTask",
    **dict.fromkeys(PRESETS, "hacrl.tasks.boxed:BoxedTask"),
    "reward": "hacrl.tasks.rewards:RewardTask",
    "environment": "hacrl.tasks.environment:EnvironmentTask",
    "calculator": "hacrl.tasks.bundled:calculator_task",
    "python": "hacrl.tasks.bundled:python_task",
    "dungeon": "hacrl.tasks.bundled:dungeon_task",
    "sqlite": "hacrl.tasks.bundled:sqlite_task",
    "written_calculator": "hacrl.tasks.bundled:written_calculator_task",
    "verifiers": "hacrl.tasks.bundled:verifiers_task",
}
_NO_OPTIONS = ("name",)  # given by the registry


def make_task(settings: TaskSettings) -> Task:
    """Return the named task, built with its options. Raise TaskError for unknown names and options."""
    factory, options = _find(settings.name)
    if not callable(factory):
        raise TaskError(f"task.name: {settings.name!r} is not a class or function that makes a task")
    check_options(
        f"task {settings.name!r}",
        factory,
        settings.options,
        key="task.options",
        given=_NO_OPTIONS,
        presets=options,
        error_type=TaskError,
    )
    options = {**options, **settings.options}
    try:
        if "verifier" in options:
            options["verifier"] = _verifier_settings(options["verifier"])
        return _with_required_members(settings.name, factory(**options))
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


def _with_required_members(name: str, task: Task) -> Task:
    missing = [member for member in REQUIRED_MEMBERS if not hasattr(task, member)]
    if missing:
        raise TaskError(
            f"task.name: {name!r} does not make a task: it has no {', '.join(missing)} (docs/extending.md)"
        )
    return task


def _find(name: str) -> tuple[Callable[..., Task], dict[str, Any]]:
    """Return the class or function that makes the task, and the options its name implies."""
    if name.startswith(GYM_PREFIX):
        from hacrl.tasks.gym.task import GymTask

        return functools.partial(GymTask, name.removeprefix(GYM_PREFIX)), {}
    if name.startswith(RETRIES_PREFIX):
        from hacrl.tasks.gym.retries import gym_retries_task

        return functools.partial(gym_retries_task, name.removeprefix(RETRIES_PREFIX)), {}
    factory = load_plugin(
        "task",
        name,
        TASKS,
        ENTRY_POINTS,
        key="task.name",
        other_names=[f"{GYM_PREFIX}NAME", f"{RETRIES_PREFIX}NAME"],
        error_type=TaskError,
    )
    return factory, {**PRESETS[name], "name": name} if name in PRESETS else {}
