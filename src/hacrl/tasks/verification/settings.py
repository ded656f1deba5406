"""How answers are checked: how many worker processes, and how long one answer may take."""

from __future__ import annotations

import os
from dataclasses import dataclass

MOST_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class VerifierSettings:
    """The worker processes that compare answers symbolically. Plain numbers never reach them."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    workers: int | None = None  # None: one per CPU core, at most 8
    time_limit: float = (
        5.0  # CPU seconds for one answer; hard: the worker is killed, at the latest after 10x by the clock
    )
    memory_limit: float | None = 2.0  # GiB of address space of a worker; None: no limit

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1, not {self.workers} (leave it out: one per core)")
        if not 0 < self.time_limit < float("inf"):
            raise ValueError(f"time_limit must be a positive number of seconds, not {self.time_limit}")
        if self.memory_limit is not None and not self.memory_limit >= 0.5:
            raise ValueError(
                f"memory_limit must be at least 0.5 (GiB), not {self.memory_limit}: less does not load sympy"
            )

    @property
    def worker_count(self) -> int:
        """How many workers there may be at once."""
        if self.workers is not None:
            return self.workers
        return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
