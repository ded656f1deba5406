"""What a user says about the task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hacrl.tasks.verification.settings import VerifierSettings


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """A task by name, with the options of that task, and how its answers are checked."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str = "arithmetic"
    options: dict[str, Any] = field(default_factory=dict)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
