"""Free and total memory, read from made-up files like those of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from hacrl.memory.host import free_bytes, total_bytes

GIB = 2**30
MEMINFO = (
    "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nBuffers: 5 kB\n"  # 8 GiB left
)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def version_1(group: str, limit: int, used: int, cache: int) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        # its own pages, which are not all: those of groups below count as used as well
        f"{folder}/memory.stat": f"cache 99\ninactive_file 7\ntotal_inactive_file {cache}",
    }


def version_2(group: str, limit: int | str, used: int, cache: int) -> dict[str, object]:
    folder = f"sys/fs/cgroup/{group}".rstrip("/")
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 12\ninactive_file {cache}\nactive_file 3",
    }


def test_without_groups_the_machines_memory_counts(tmp_path: Path) -> None:
    assert free_bytes(write(tmp_path, {"proc/meminfo": MEMINFO})) == 8 * GIB


def test_memory_is_unknown_without_the_files(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) is None
    assert free_bytes(write(tmp_path, {"proc/meminfo": "MemTotal: 5 kB\nMemAvailable: many kB"})) is None


@pytest.mark.parametrize(
    ("limit", "used", "cache", "left"),
    [
        (6 * GIB, 4 * GIB, GIB, 3 * GIB),  # 6 - 4, and 1 of files' pages that can be had back
        (6 * GIB, 6 * GIB + 5, 0, 0),
        (100 * GIB, 4 * GIB, 0, 8 * GIB),  # the machine has less
    ],
)
def test_the_limit_of_a_group_of_either_version_counts(
    tmp_path: Path, limit: int, used: int, cache: int, left: int
) -> None:
    first = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/"}
    assert free_bytes(write(tmp_path / "1", {**first, **version_1("a/b", limit, used, cache)})) == left
    second = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b"}
    assert free_bytes(write(tmp_path / "2", {**second, **version_2("a/b", limit, used, cache)})) == left


def test_total_memory_is_the_machines_or_the_lowest_limit(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) is None
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b", **version_2("a/b", "max", 5, 0)}
    assert total_bytes(write(tmp_path / "free", files)) == 32 * GIB
    files |= version_2("a", 12 * GIB, 11 * GIB, 0)  # used or not
    assert total_bytes(write(tmp_path / "tight", files)) == 12 * GIB
    files |= version_2("a/b", 64 * GIB, 5, 0) | version_2("a", 64 * GIB, 5, 0)
    assert total_bytes(write(tmp_path / "wide", files)) == 32 * GIB


def test_lines_without_a_group_are_ignored(tmp_path: Path) -> None:
    lines = "\ngarbage\n0::/a"
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": lines, **version_2("a", 5 * GIB, 4 * GIB, 0)}
    assert free_bytes(write(tmp_path, files)) == GIB


def test_groups_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a", **version_2("a", "max", 5, 0)}
    assert free_bytes(write(tmp_path / "2", files)) == 8 * GIB
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:memory:/a",
        **version_1("a", 9223372036854771712, 5, 0),
    }
    assert free_bytes(write(tmp_path / "1", files)) == 8 * GIB


def test_a_parent_group_may_have_the_lowest_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/slice/job/step",
        **version_2("slice/job/step", "max", 1, 0),
        **version_2("slice/job", 5 * GIB, 3 * GIB, 0),
        **version_2("slice", 7 * GIB, 3 * GIB, 0),
    }
    assert free_bytes(write(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("4:memory:/docker/0123", version_1("", 3 * GIB, GIB, 0)),  # the host's path; only our own is mounted
        ("0::/", version_2("", 3 * GIB, GIB, 0)),
    ],
)
def test_in_a_container(tmp_path: Path, line: str, files: dict[str, object]) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": line, **files}
    assert free_bytes(write(tmp_path, files)) == 2 * GIB


def test_groups_of_other_controllers_do_not_count(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "4:cpu,cpuset:/a\n5:memory_of_others:/a",
        **version_1("a", 5, 0, 0),
    }
    assert free_bytes(write(tmp_path, files)) == 8 * GIB
