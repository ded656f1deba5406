"""How many runs go on at a time: cores, and a GPU's memory as it is read while runs are under way."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hacrl.config.load import load_config
from hacrl.errors import ConfigError
from hacrl.studies.capacity import (
    FixedCapacity,
    GpuCapacity,
    GpuMemory,
    capacity_of,
    read_gpus,
    runs_that_fit,
    usable_cores,
)

GIB = 2**30


def steps(folder: Path, count: int) -> Path:
    """A run's folder after so many steps."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("{}\n" * count)
    return folder


def capacity(*used: int, cores: int = 16, total: int = 100) -> GpuCapacity:
    """A capacity that reads these numbers of GiB one after the other."""
    readings: Iterator[int] = iter(used)
    return GpuCapacity(lambda: [GpuMemory(next(readings) * GIB, total * GIB)], cores)


def test_runs_that_fit_by_hand() -> None:
    # (100 * 0.95 - 3) / (10 * 1.15) = 92 / 11.5 = 8
    assert runs_that_fit(GpuMemory(3 * GIB, 100 * GIB), 10 * GIB) == 8
    assert runs_that_fit(GpuMemory(4 * GIB, 100 * GIB), 10 * GIB) == 7  # 91 / 11.5 = 7.9
    assert runs_that_fit(GpuMemory(3 * GIB, 100 * GIB), 90 * GIB) == 1  # one run always starts


def test_the_first_run_has_the_gpu_to_itself_until_it_is_measured(tmp_path: Path) -> None:
    found = capacity(3, 8, 13, 13, 24, 47)
    assert found.limit([]) == 1
    one = steps(tmp_path / "one", 1)
    assert found.limit([one]) == 1
    assert "1 at a time until the first has made 2 steps" in found.describe()
    steps(one, 2)
    assert found.limit([one]) == 8  # 13 - 3 = 10 GiB a run
    assert "8 at a time: a run needs 10.0 GiB of a GPU's 100 GiB" in found.describe()
    two = tmp_path / "two"
    assert found.limit([one, two]) == 8  # the second run loads
    assert found.limit([one, two]) == 7  # (24 - 3) / 2 = 10.5 GiB: 92 / 12.075 = 7.6
    assert found.limit([one, two]) == 3  # (47 - 3) / 2 = 22 GiB: 92 / 25.3 = 3.6; runs under way stay


def test_a_run_needs_cores_beside_memory(tmp_path: Path) -> None:
    found = capacity(0, 1, cores=4)
    found.limit([])
    assert found.limit([steps(tmp_path / "one", 2)]) == 4  # of 82 that fit


def test_a_gpu_that_the_runs_do_not_use_does_not_count(tmp_path: Path) -> None:
    readings = iter([[(0, 100), (90, 100)], [(10, 100), (90, 100)]])
    found = GpuCapacity(lambda: [GpuMemory(u * GIB, t * GIB) for u, t in next(readings)], cores=16)
    found.limit([])
    assert found.limit([steps(tmp_path / "one", 2)]) == 8  # 95 / 11.5 = 8.3


def test_gpus_are_read_from_the_drivers_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1024, 143771'\necho '0, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert read_gpus() == [GpuMemory(GIB, 143771 * 2**20), GpuMemory(0, 143771 * 2**20)]
    tool.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(ConfigError, match=r"nvidia-smi, which failed: .*; give a number, e.g. --jobs 2"):
        read_gpus()


def test_on_a_cpu_cores_decide(tmp_path: Path) -> None:
    config = load_config(Path("demo"), ["threads=1", "device=cpu"])
    cores = usable_cores()
    assert capacity_of(None, [config]) == FixedCapacity(cores, f" ({cores} CPU cores, 1 for each run)")
    assert capacity_of(3, [config]).limit([]) == 3
    many = load_config(Path("demo"), ["threads=1000", "device=cpu"])
    assert capacity_of(None, [config, many]).limit([]) == 1


def test_a_containers_quota_limits_the_cores(tmp_path: Path) -> None:
    own = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == own  # no container
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("100000 100000\n")
    assert usable_cores(tmp_path) == 1
    quota.write_text("max 100000\n")
    assert usable_cores(tmp_path) == own
