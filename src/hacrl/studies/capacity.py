"""How many runs of a study go on at a time: a given number, as many as there are cores, or as fit on the GPU.

On a GPU nobody knows what a run needs before it has run. The first run has the device to itself until it has
made a few steps. What the device's memory has grown by then, with some headroom, is what every run is given.
Later readings correct the number: no further run starts if those under way turn out to need more.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.models.device import agent_device

HEADROOM = 1.15  # of what a run was measured to need: responses grow longer as training goes on
RESERVE = 0.05  # share of a GPU's memory that stays free
MEASURED_STEPS = 2  # of the first run, before others start beside it
MEASURED_BYTES = 64 * 2**20  # smaller growth is noise: the run does not use that GPU
AUTO = "auto"

_MIB = 2**20


@dataclass(frozen=True)
class GpuMemory:
    """One GPU's memory in bytes, whoever uses it."""

    used: int
    total: int


class Capacity(Protocol):
    """Says how many runs may be under way now."""

    def limit(self, running: Sequence[Path]) -> int:
        """Return the number of runs; ``running`` are the folders of those under way."""

    def describe(self) -> str:
        """Return the number, and why, for the user."""


@dataclass(frozen=True)
class FixedCapacity:
    """The same number of runs all the time."""

    runs: int
    reason: str = ""

    def limit(self, running: Sequence[Path]) -> int:
        """Return the number."""
        return self.runs

    def describe(self) -> str:
        """Return the number, and why."""
        return f"{self.runs} at a time{self.reason}"


class GpuCapacity:
    """As many runs as fit on the GPUs by what the first one needs, at most ``cores``."""

    def __init__(self, read: Callable[[], list[GpuMemory]], cores: int) -> None:
        self._read, self._cores = read, cores
        self._before: list[GpuMemory] = []  # any run; what others use stays theirs
        self._needs: list[int] = []  # by GPU: the most that a run was seen to need
        self._is_measured = False

    def limit(self, running: Sequence[Path]) -> int:
        """Return 1 until the first run is measured, then what fits."""
        readings = self._read()
        if not self._before:
            self._before, self._needs = readings, [0] * len(readings)
        if running:
            for i, (now, before) in enumerate(zip(readings, self._before, strict=True)):
                self._needs[i] = max(self._needs[i], (now.used - before.used) // len(running))
        self._is_measured |= any(_steps_done(folder) >= MEASURED_STEPS for folder in running)
        return min(self._cores, self._fitting()) if self._is_measured else 1

    def describe(self) -> str:
        """Return what was measured, and how many runs fit."""
        if not self._is_measured:
            return (
                f"1 at a time until the first has made {MEASURED_STEPS} steps, then as many as fit on the GPU"
            )
        need, total = max(zip(self._needs, (gpu.total for gpu in self._before), strict=True))
        return (
            f"{min(self._cores, self._fitting())} at a time: a run needs {need / 2**30:.1f} GiB of a GPU's "
            f"{total / 2**30:.0f} GiB, and there are {self._cores} CPU cores"
        )

    def _fitting(self) -> int:
        return min(
            (
                runs_that_fit(before, need)
                for before, need in zip(self._before, self._needs, strict=True)
                if need > MEASURED_BYTES
            ),
            default=self._cores,
        )


def runs_that_fit(before: GpuMemory, need: int) -> int:
    """Return how many runs of ``need`` bytes fit beside what a GPU holds already; at least 1."""
    return max(1, int((before.total * (1 - RESERVE) - before.used) / (need * HEADROOM)))


def capacity_of(jobs: int | None, configs: Sequence[RunConfig]) -> Capacity:
    """Return the capacity for ``--jobs``; None is ``auto``."""
    if jobs is not None:
        return FixedCapacity(jobs)
    threads = max(config.threads or 1 for config in configs)
    cores = usable_cores()
    runs = max(1, cores // threads)
    uses_gpu = any(agent_device(config, agent) != "cpu" for config in configs for agent in config.agents)
    if uses_gpu:
        return GpuCapacity(read_gpus, runs)
    return FixedCapacity(runs, f" ({cores} CPU cores, {threads} for each run)")


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one of another kind
        return cores


def read_gpus() -> list[GpuMemory]:
    """Return the memory of all GPUs, as the driver's own tool reports it.

    torch would start a context of half a GiB in this process, beside those of the runs.
    """
    query = ["nvidia-smi", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        rows = [[int(number) for number in line.split(",")] for line in output.splitlines() if line.strip()]
        return [GpuMemory(used * _MIB, total * _MIB) for used, total in rows]
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--jobs auto measures a GPU's memory with nvidia-smi, which failed: {error}; give a number, "
            "e.g. --jobs 2"
        ) from error


def _steps_done(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:  # the run has not got that far
        return 0
