"""Settings of the task, and the limits of the processes that verify its answers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from hacrl.config.settings import Settings

MOST_WORKERS = 8
# Longest response in tokens by task, for recipes that do not set rollout.max_new_tokens. Solutions of GSM8K
# take 50 to 400 tokens, those of MATH up to 1000; models that think step by step need about twice as many.
# An episode has all its turns and observations in one response.
RESPONSE_TOKENS = {"gsm8k": 512, "math": 1024, "boxed": 512, "gym": 256, "environment": 1024}


@dataclass(frozen=True, kw_only=True)
class TaskSettings(Settings):
    """A task by name, with the options of that task."""

    name: str = "arithmetic"
    """The task: `arithmetic`, `math`, `gsm8k`, `gym:NAME`, ..., or `module:attribute` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that task."""


@dataclass(frozen=True, kw_only=True)
class VerifierSettings(Settings):
    """Limits of the worker processes that compare answers symbolically.

    Parameters of a verifier in Python; a run uses the defaults. Plain numbers never reach a worker process.
    """

    workers: int | None = None
    """Worker processes. Default: one per CPU core, at most 8."""
    time_limit: float = 5.0
    """CPU seconds for one answer; the worker is killed, at the latest after ten times as long by the
    clock."""
    memory_limit: float | None = 2.0
    """GiB of address space of a worker; None: no limit."""

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
        """Most worker processes at once."""
        if self.workers is not None:
            return self.workers
        return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
