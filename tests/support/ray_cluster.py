"""A Ray cluster on this machine for tests, and processes of agents that are killed at chosen moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hacrl.executors.ray.executor import RayExecutor
from hacrl.runs.run import LocalRun
from hacrl.training.observer import Observer, Phase

Moment = tuple[int, Phase, str]  # step, phase, agent


@contextmanager
def connected(cores: int = 8) -> Iterator[None]:
    """Start a cluster that all runs of the block share: hacrl uses the connection of its program."""
    import ray

    ray.init(
        address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        yield
    finally:
        ray.shutdown()


class Killer(Observer):
    """Kills an agent's process when a phase of the agent begins."""

    def __init__(self, moments: Sequence[Moment]) -> None:
        self.waiting = list(moments)
        self.killed: list[Moment] = []
        self.notes: list[str] = []
        self.seconds: list[float] = []  # from each kill to the agent's next phase
        self.run: LocalRun | None = None
        self._lost_at: dict[str, float] = {}

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if agent in self._lost_at:
            self.seconds.append(time.monotonic() - self._lost_at.pop(agent))
        moment = (step, phase, agent)
        if moment in self.waiting:
            self.waiting.remove(moment)
            self.killed.append(moment)
            assert self.run is not None
            executor = self.run.trainer.executor
            assert isinstance(executor, RayExecutor)
            os.kill(executor.processes[agent].pid, signal.SIGKILL)
            self._lost_at[agent] = time.monotonic()

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)


def member_processes() -> list[int]:
    """Return the process ids of all actors that are further processes of agents."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # the process has ended meanwhile
                if b"ray::MemberActor" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found
