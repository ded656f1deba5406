"""What an environment is, what an episode reports, and the limits of an episode.

An environment is an object of any class; it needs no base class. It has one of two forms.

**Tools**, as in TRL: ``reset(self, **row) -> str | None`` begins an episode; the text, if there is one, is
added to the prompt. Every other public method is a tool, described by its type hints and its docstring in
Google's style. ``get_reward(self) -> float`` is optional. So is an attribute ``done``: the episode ends once
it is True.

**Text**: ``step(self, text) -> tuple[str, float, bool]`` takes the agent's text and returns the observation,
the reward of the turn and whether the episode is over. ``reset(self, **row) -> str | None`` and
``observe(self) -> str`` begin an episode; at least one of them gives the opening text. ``get_reward`` is
optional; without it, the rewards of the turns count. An environment has this form if it has ``observe``, or
if its ``step`` is annotated to return a tuple.

Every method may be ``async``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hacrl.types import Problem, Tool, Turn

# "timeout": a limit on time. "crash": the environment raised an error or died.
FailureKind = Literal["", "timeout", "crash"]
Call = Literal["start", "act", "finish"]
Factory = Callable[..., Any]  # makes an environment


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Where environments of one name come from.

    ``factory`` is a class or function that makes an environment, or a reference to one as text:
    ``package.module:name`` or ``path/to/file.py:name``. ``options`` are its keyword arguments, plain JSON.
    """

    factory: Factory | str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """Limits of one episode. A call is a reset, the answer to one action, or the final reward."""

    call_seconds: float = 60.0  # of one call, by the clock, from when it runs
    episode_seconds: float | None = 600.0  # of all calls of an episode together; None: no limit
    # GiB of address space that each process may take, beyond that of the imported modules; None: no limit
    memory: float | None = 2.0
    processes: int = 64  # of an episode at once
    observation_characters: int = 20_000  # of one opening, tool result or observation; the rest is cut
    # Calls that run at once, over all episodes; others wait, and their clock with them. None: 8 per core
    running_calls: int | None = None

    def __post_init__(self) -> None:
        for name in ("call_seconds", "episode_seconds", "memory"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, not {value}")
        for name in ("processes", "observation_characters", "running_calls"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True, slots=True)
class EnvironmentDescription:
    """What one environment offers."""

    name: str
    tools: tuple[Tool, ...]  # empty for the text form
    is_text: bool  # whether it has the text form
    has_reward: bool  # whether it has ``get_reward``
    required_columns: tuple[str, ...] = ()  # parameters of ``reset`` without a default


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call of an episode. After a failure the episode is over and its process is gone."""

    call: Call
    opening: str = ""  # of a start: what is added to the prompt
    turns: tuple[Turn, ...] = ()  # of an act: one turn per tool call, or one user turn
    # Of an act in the text form: the turn's reward. Of a finish: that of get_reward, None without the method.
    reward: float | None = None
    done: bool = False  # whether the environment ended the episode
    tool_errors: int = 0  # tool calls whose result is an error
    failure: str = ""  # why the episode failed, e.g. "reset raised ValueError: no such level"
    failure_kind: FailureKind = ""
    seconds: float = 0.0  # that the call took, by the clock; for metrics, never for records


def row_of(problem: Problem) -> dict[str, Any]:
    """Return what ``reset`` gets: the problem's prompt, its answer if it has one, and its fields.

    A field named ``prompt`` or ``answer`` takes precedence: the data set's column is passed on as it is.
    """
    row: dict[str, Any] = {"prompt": problem.prompt}
    if problem.answer:
        row["answer"] = problem.answer
    return {**row, **problem.fields}
