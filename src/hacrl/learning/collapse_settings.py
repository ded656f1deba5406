"""When an agent's policy counts as collapsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CollapseSettings:
    """When an agent counts as collapsed, and what is done about it."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    steps: int = 20  # in a row; 0: nobody looks
    action: Literal["note", "pause"] = "note"  # "pause": it neither answers nor learns; the others go on

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must not be negative, not {self.steps} (0: off)")
