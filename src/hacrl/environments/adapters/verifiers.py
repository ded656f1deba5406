"""Tasksets of verifiers (its ``verifiers.v1``) in hacrl's text form (``pip install 'hacrl[verifiers]'``).

A task of a taskset becomes a row, and its ``@vf.reward`` methods judge the agent's one response. Tasks that
need a container, tools, or steps before and after the response are refused: verifiers' own runtimes do that.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

from hacrl.errors import TaskError
from hacrl.plugins import is_reference, load_reference, optional_module


def _module(name: str) -> Any:
    return optional_module(name, extra="verifiers", needed_for="a taskset of verifiers")


with suppress(ImportError):  # imported with this module, so that the processes of episodes share it
    importlib.import_module("verifiers.v1")
MOST_TASKS = 100_000  # that are read of a taskset whose load never ends


class VerifiersTask:
    """One response to a task of a taskset; its weighted rewards are the reward.

    ``taskset`` is ``module:Class``, or the id of an installed taskset; ``config`` its settings.
    """

    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None) -> None:
        self._taskset = load_taskset(taskset, config)
        self._task: Any = None

    def reset(self, task: Mapping[str, Any], **row: Any) -> str:
        """Make the task again from the row's column ``task``. Nothing is added to the prompt."""
        kind = self._taskset.task_type()
        data = kind.data_type().model_validate(dict(task))
        self._task = kind(data, self._taskset.config.task)
        return ""

    async def step(self, text: str) -> tuple[str, float, bool]:
        """Judge the response; it ends the episode."""
        trace = trace_of(self._task, text)
        await self._task.score(trace)
        return "", float(trace.reward), True


def load_taskset(name: str, config: Mapping[str, Any] | None = None) -> Any:
    """Return the taskset, made with its settings. Raise TaskError if it cannot be made."""
    vf = _module("verifiers.v1")
    if is_reference(name):
        kind = load_reference(name, "taskset", TaskError)
    else:
        try:
            kind = _module("verifiers.v1.utils.loaders").taskset_class(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise TaskError(f"taskset: {name!r} cannot be loaded: {error}") from error
    generic = _module("verifiers.v1.utils.generic")
    settings = generic.concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig
    try:
        return kind(settings.model_validate(dict(config or {})))
    except ValueError as error:  # pydantic's ValidationError
        raise TaskError(f"config: taskset {name!r} refuses {dict(config or {})}: {error}") from error


def taskset_rows(
    name: str, config: Mapping[str, Any] | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return the taskset's tasks as rows with the columns ``prompt`` and ``task``.

    ``prompt`` is text, or a list of messages if the task has a system prompt or several messages. ``limit``:
    the number of tasks; needed for a taskset that never ends. Raise TaskError for a task that needs more
    than a response.
    """
    taskset = load_taskset(name, config)
    if limit is None and not taskset.bounded:
        raise TaskError(f"limit: taskset {name!r} never ends; give the number of its tasks to use")
    if type(taskset).toolsets(taskset.config):
        raise TaskError(f"taskset: {name!r} has tools, which hacrl does not start")
    rows = []
    for task in islice(taskset, MOST_TASKS if limit is None else limit):
        _check_task(name, task)
        data = task.data.model_dump(mode="json", exclude_none=True)
        rows.append({"prompt": _prompt(name, task), "task": data})
    if not rows:
        raise TaskError(f"taskset: {name!r} has no tasks")
    return rows


def trace_of(task: Any, text: str) -> Any:
    """Return verifiers' record of an episode: the task's messages and one response."""
    vf, state, graph = (
        _module(name) for name in ("verifiers.v1", "verifiers.v1.state", "verifiers.v1.graph")
    )
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state.state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    messages = [*_messages(task), {"role": "assistant", "content": text}]
    for number, message in enumerate(messages):
        node = {
            "parent": number - 1 if number else None,
            "message": message,
            "sampled": number == len(messages) - 1,
        }
        trace.nodes.append(graph.MessageNode.model_validate(node))
    trace.stop("agent_completed")
    return trace


def _messages(task: Any) -> list[dict[str, Any]]:
    data = task.data
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt or [])]


def _prompt(name: str, task: Any) -> str | list[dict[str, Any]]:
    messages = _messages(task)
    if not messages or messages[-1]["role"] != "user":
        raise TaskError(
            f"taskset: a task of {name!r} does not end with a user's message, so nothing is asked"
        )
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise TaskError(f"taskset: a task of {name!r} has messages that are not plain text")
    return messages if len(messages) > 1 else str(messages[0]["content"])


def _check_task(name: str, task: Any) -> None:
    """Raise TaskError if the task cannot be judged by its response alone."""
    base, kind = _module("verifiers.v1").Task, type(task)
    if kind.NEEDS_CONTAINER or task.data.image is not None:
        raise TaskError(f"taskset: tasks of {name!r} need a container, which hacrl does not start")
    for method in ("setup", "finalize"):
        if getattr(kind, method) is not getattr(base, method):
            raise TaskError(
                f"taskset: tasks of {name!r} have a method {method}, which needs verifiers' runtime"
            )
    if kind.toolsets(task.config):
        raise TaskError(f"taskset: tasks of {name!r} have tools, which hacrl does not start")
    rewards = task.hooks("reward")
    if not rewards and not task.config.judges:
        raise TaskError(f"taskset: tasks of {name!r} have no @vf.reward, so no response earns anything")
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            raise TaskError(f"taskset: the reward {reward.__name__} of {name!r} needs verifiers' runtime")
