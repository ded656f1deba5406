"""Play episodes and look at processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from hacrl.environments.interface import Outcome
from hacrl.environments.pool import EnvironmentPool
from hacrl.types import Problem, ToolCall, Turn

PATIENCE = 120.0  # seconds until a test gives up; nothing is expected to take that long


def play(pool: EnvironmentPool, key: int, **row: object) -> Outcome:
    """Start an episode and wait for its outcome."""
    pool.start(key, problem(**row))
    return only(pool, key)


def problem(name: str = "problem", environment: str = "", **row: object) -> Problem:
    return Problem(name, "question", "12", fields=row, environment=environment)


def call(pool: EnvironmentPool, key: int, *tools: tuple[str, str]) -> Outcome:
    """Call tools and wait for the outcome."""
    pool.act(key, Turn("assistant", "", tuple(ToolCall(*tool) for tool in tools)))
    return only(pool, key)


def say(pool: EnvironmentPool, key: int, text: str) -> Outcome:
    """Act by text and wait for the outcome."""
    pool.act(key, Turn("assistant", text))
    return only(pool, key)


def finish(pool: EnvironmentPool, key: int) -> Outcome:
    """Finish an episode and wait for its outcome."""
    pool.finish(key)
    return only(pool, key)


def only(pool: EnvironmentPool, key: int) -> Outcome:
    ((found, outcome),) = pool.wait(PATIENCE)
    assert found == key
    return outcome


def marked_processes(mark: str) -> list[int]:
    """Return the processes that have a text in their environment variables, but for ended ones."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
    return found


def processes_settle(mark: str, count: int) -> bool:
    """Wait until so many marked processes are left; False if that does not happen."""
    until = time.monotonic() + PATIENCE
    while len(marked_processes(mark)) != count:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def parent_of(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
