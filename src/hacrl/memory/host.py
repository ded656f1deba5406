"""How much of the machine's memory this process may use before the kernel kills a process for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _CgroupFiles:
    """The folder of the control groups, and the names of their files, which depend on the cgroup version."""

    folder: str
    limit: str
    used: str
    cache: str  # key in memory.stat: file pages, of child groups too, that the kernel can reclaim


_VERSION_1 = _CgroupFiles(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the least of what the machine and each of the process's control groups have free.

    None if it is not known.
    """
    groups = (_free_in_group(folder, files) for folder, files in _groups(root))
    found = [_of_machine(root, "MemAvailable:"), *groups]
    return min((size for size in found if size is not None), default=None)


def total_bytes(root: Path = Path("/")) -> int | None:
    """Return the machine's memory or the lowest control group's limit, used or not; None if not known."""
    limits = (_number(folder / files.limit) for folder, files in _groups(root))
    found = [_of_machine(root, "MemTotal:"), *limits]
    return min((size for size in found if size is not None), default=None)


def _of_machine(root: Path, key: str) -> int | None:
    kibibytes = _entry(root / "proc/meminfo", key)
    return None if kibibytes is None else kibibytes * 1024


def _groups(root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folder of each control group of the process, and the files in it."""
    for line in _lines(root / "proc/self/cgroup"):
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        # Limits of all parent groups count as well. In a container the path may be the host's: then only the
        # container's own group is visible, as the top one.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield root / files.folder / group, files


def _free_in_group(folder: Path, files: _CgroupFiles) -> int | None:
    limit, used = _number(folder / files.limit), _number(folder / files.used)
    if limit is None or used is None:
        return None
    return max(0, limit - used + (_entry(folder / "memory.stat", files.cache) or 0))


def _number(path: Path) -> int | None:
    """Return the only number in a file; None if the file has "max" instead."""
    words = [line.strip() for line in _lines(path)]
    return int(words[0]) if words and words[0].isdecimal() else None


def _entry(path: Path, key: str) -> int | None:
    """Return the number that follows ``key`` on a line of the file."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdecimal():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # missing, or without permission to read
        return []
