"""What a user says about the task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """A task by name, with the options of that task."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str = "arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
