"""What the pool receives from an episode, and how it becomes an outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hacrl.environments.interface import Call, EnvironmentDescription, FailureKind, Outcome
from hacrl.plain_text import printable
from hacrl.types import Tool, Turn

LONGEST_FAILURE = 500  # characters


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a player, or why there is none."""

    content: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
    kind: FailureKind = ""
    seconds: float = 0.0


def outcome_of(call: Call, reply: Reply) -> Outcome:
    """Return the outcome of a call. A reply of the wrong form, which an environment can send, is a crash."""
    failure, kind = reply.failure, reply.kind
    try:
        content = reply.content
        if not failure and "failure" in content:
            failure, kind = str(content["failure"]), "crash"
        if not failure:
            reward = None if content.get("reward") is None else float(content["reward"])
            if reward is not None and not math.isfinite(reward):
                raise ValueError
            return Outcome(
                call,
                opening=_text(content.get("opening", "")),
                turns=tuple(_turn(*parts) for parts in content.get("turns", ())),
                reward=reward,
                done=bool(content.get("done", False)),
                tool_errors=int(content.get("tool_errors", 0)),
                seconds=reply.seconds,
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        failure, kind = "sent something else than a reply", "crash"
    failure = printable(failure)[:LONGEST_FAILURE]
    return Outcome(call, failure=failure, failure_kind=kind, seconds=reply.seconds)


def description_of(name: str, content: Mapping[str, Any]) -> EnvironmentDescription:
    """Return the description that a player gave."""
    return EnvironmentDescription(
        name,
        tuple(Tool(**tool) for tool in content["tools"]),
        content["is_text"],
        content["has_reward"],
        tuple(content["required_columns"]),
    )


def _turn(role: str, content: str, tool: str) -> Turn:
    if role not in ("tool", "user"):
        raise ValueError(role)
    return Turn("tool" if role == "tool" else "user", _text(content), tool=_text(tool))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value
