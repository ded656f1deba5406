"""How much of the machine's memory this process may take before somebody is killed for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class _Files:
    """Where the control groups are, and what a version of them calls its files."""

    folder: str
    limit: str
    used: str
    cache: str  # in memory.stat: pages of files, of groups below too, which are given back when asked for


_VERSION_1 = _Files(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def bytes_left(root: Path = Path("/")) -> int | None:
    """The least of what the machine and each of the process's control groups have left; None: not known."""
    groups = (_of_group(folder, files) for folder, files in _groups(root))
    found = [_of_machine(root, "MemAvailable:"), *groups]
    return min((one for one in found if one is not None), default=None)


def bytes_allowed(root: Path = Path("/")) -> int | None:
    """All of it, whoever uses it now: the machine's, or a control group's limit; None: not known."""
    limits = (_number(folder / files.limit) for folder, files in _groups(root))
    found = [_of_machine(root, "MemTotal:"), *limits]
    return min((one for one in found if one is not None), default=None)


def _of_machine(root: Path, what: str) -> int | None:
    kibibytes = _entry(root / "proc/meminfo", what)
    return None if kibibytes is None else kibibytes * 1024


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
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
        # A limit of any group above counts as well. In a container the path may be the host's, of which
        # nothing is to be seen but the container's own group, as the top one.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            yield root / files.folder / group, files


def _of_group(folder: Path, files: _Files) -> int | None:
    limit, used = _number(folder / files.limit), _number(folder / files.used)
    if limit is None or used is None:
        return None
    return max(0, limit - used + (_entry(folder / "memory.stat", files.cache) or 0))


def _number(path: Path) -> int | None:
    """A file of one number; "max" is none."""
    words = [line.strip() for line in _lines(path)]
    return int(words[0]) if words and words[0].isdecimal() else None


def _entry(path: Path, key: str) -> int | None:
    """The number behind a word, in a file of such lines."""
    for line in _lines(path):
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdecimal():
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # not there, or not ours to read
        return []
