"""How long the rollout log keeps what it has written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RolloutLogSettings:
    """Retention of ``RUN/rollouts``. Steps that a resumed run would need are always kept."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    keep: int | Literal["all", "none"] = "all"  # every step, none, or the last so many steps

    def __post_init__(self) -> None:
        if isinstance(self.keep, int) and self.keep < 1:
            raise ValueError(f"keep must be all, none or a number of steps of at least 1, not {self.keep}")
