"""Bundled tasks: the ``environment`` task with environments and questions of hacrl's own.

All of them work offline. Every further option is one of :class:`~hacrl.tasks.environment.EnvironmentTask`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hacrl.environments.bundled.dungeon import dungeon_rows
from hacrl.environments.bundled.python_problems import python_problems
from hacrl.environments.bundled.rows import Row
from hacrl.environments.bundled.sqlite_problems import sqlite_problems
from hacrl.environments.bundled.word_problems import word_problems
from hacrl.errors import TaskError
from hacrl.plugins import check_options
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.tasks.environment import EnvironmentTask

BUNDLED = "hacrl.environments.bundled"
_GIVEN = ("environment", "train", "test", "test_share", "columns", "name")  # by the tasks below

DEFAULT_SIZE = 1000
DEFAULT_TEST_SIZE = 100


def calculator_task(
    *, size: int = DEFAULT_SIZE, test_size: int = DEFAULT_TEST_SIZE, seed: int = 0, **options: Any
) -> EnvironmentTask:
    """Return the task ``calculator``: word problems, with the tools ``calculate`` and ``submit``."""
    rows = word_problems(size=size, test_size=test_size, seed=seed)
    return _task("calculator", f"{BUNDLED}.calculator:Calculator", {}, rows, options)


def python_task(
    *,
    size: int = DEFAULT_SIZE,
    test_size: int = DEFAULT_TEST_SIZE,
    seed: int = 0,
    cpu_seconds: int = 2,
    wall_seconds: float = 10.0,
    memory_mb: int = 512,
    output_characters: int = 2000,
    **options: Any,
) -> EnvironmentTask:
    """Return the task ``python``: questions for a short program, with ``run_python`` and ``submit``.

    Raise TaskError if this machine cannot run the sandbox.
    """
    from hacrl.environments.bundled.sandbox import SandboxLimits, check_sandbox

    SandboxLimits(cpu_seconds, wall_seconds, memory_mb, output_characters)  # refuses wrong values
    check_sandbox()
    limits = {
        "cpu_seconds": cpu_seconds,
        "wall_seconds": wall_seconds,
        "memory_mb": memory_mb,
        "output_characters": output_characters,
    }
    rows = python_problems(size=size, test_size=test_size, seed=seed)
    return _task("python", f"{BUNDLED}.python_tool:PythonInterpreter", limits, rows, options)


def dungeon_task(
    *,
    size: int = DEFAULT_SIZE,
    test_size: int = DEFAULT_TEST_SIZE,
    seed: int = 0,
    rooms: int = 5,
    spare_moves: int = 12,
    **options: Any,
) -> EnvironmentTask:
    """Return the task ``dungeon``: a text game with a hidden map, a key and a locked door."""
    rows = dungeon_rows(size=size, test_size=test_size, seed=seed, rooms=rooms, spare_moves=spare_moves)
    turns = max(row["moves"] for row in (*rows[0], *rows[1]))
    return _task("dungeon", f"{BUNDLED}.dungeon:DungeonGame", {}, rows, {"max_turns": turns, **options})


def sqlite_task(
    *,
    size: int = DEFAULT_SIZE,
    test_size: int = DEFAULT_TEST_SIZE,
    seed: int = 0,
    databases: int = 40,
    instructions: int = 5_000_000,
    rows: int = 50,
    **options: Any,
) -> EnvironmentTask:
    """Return the task ``sqlite``: questions on generated databases, with ``query`` and ``submit``."""
    for name, value in (("databases", databases), ("instructions", instructions), ("rows", rows)):
        if type(value) is not int or value < 1:
            raise TaskError(f"{name}={value!r}: must be a whole number of at least 1")
    questions = sqlite_problems(size=size, test_size=test_size, seed=seed, databases=databases)
    limits = {"instructions": instructions, "rows": rows}
    return _task("sqlite", f"{BUNDLED}.sqlite_tool:DatabaseQuestions", limits, questions, options)


def written_calculator_task(
    *, per_pattern: int | None = 1000, max_turns: int = 4, **options: Any
) -> EnvironmentTask:
    """Return the task ``written_calculator``: the sums of ``arithmetic``, with a calculator in plain text.

    The problems and their split are those of ``arithmetic``.
    """
    sums = ArithmeticTask(per_pattern=per_pattern)
    train, test = (
        [{"prompt": problem.prompt, "answer": problem.answer} for problem in split]
        for split in (sums.train, sums.test)
    )
    options = {"max_turns": max_turns, **options}
    return _task(
        "written_calculator", f"{BUNDLED}.written_calculator:WrittenCalculator", {}, (train, test), options
    )


def verifiers_task(
    *,
    taskset: str,
    config: Mapping[str, Any] | None = None,
    size: int | None = None,
    test_share: float = 0.1,
    **options: Any,
) -> EnvironmentTask:
    """Return the task ``verifiers``: a taskset of the package verifiers, judged by its own rewards.

    ``size``: the number of tasks, needed for a taskset that never ends.
    """
    from hacrl.environments.adapters.verifiers import taskset_rows

    rows = taskset_rows(taskset, config, size)
    environment = {
        "factory": "hacrl.environments.adapters.verifiers:VerifiersTask",
        "options": {"taskset": taskset, "config": dict(config or {})},
    }
    _check("verifiers", options)
    return EnvironmentTask(
        environment=environment,
        train=rows,
        test_share=test_share,
        name="verifiers",
        **{"max_turns": 1, **options},
    )


def _task(
    name: str,
    factory: str,
    environment_options: Mapping[str, Any],
    rows: tuple[list[Row], list[Row]],
    options: Mapping[str, Any],
) -> EnvironmentTask:
    _check(name, options)
    train, test = rows
    return EnvironmentTask(
        environment={"factory": factory, "options": dict(environment_options)},
        train=train,
        test=test or None,
        name=name,
        **options,
    )


def _check(name: str, options: Mapping[str, Any]) -> None:
    """Raise TaskError for an option that neither the bundled task nor the ``environment`` task takes."""
    check_options(
        f"task {name!r}",
        EnvironmentTask,
        options,
        key="task.options",
        given=_GIVEN,
        error_type=TaskError,
    )
