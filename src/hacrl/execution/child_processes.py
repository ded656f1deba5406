"""The processes that a run has started, as the kernel sees them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "Z": "ended, not collected",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
    "X": "dead",
}
_LONGEST_COMMAND = 200  # characters


@dataclass(frozen=True)
class ChildProcess:
    """One process below a run's own."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    command: str

    def __str__(self) -> str:
        used = f"{self.cpu_seconds:.1f} s of CPU"
        return f"pid {self.pid} (parent {self.parent}), {self.state}, {used}: {self.command}"


def child_processes(pid: int, proc: Path = Path("/proc")) -> list[ChildProcess] | None:
    """All processes below one, its own children first; None where the system has no /proc to ask."""
    if not (proc / "self" / "stat").exists():
        return None
    found = [_read(entry) for entry in proc.iterdir() if entry.name.isdecimal()]
    by_parent: dict[int, list[ChildProcess]] = {}
    for one in sorted((one for one in found if one is not None), key=lambda one: one.pid):
        by_parent.setdefault(one.parent, []).append(one)
    below: list[ChildProcess] = list(by_parent.get(pid, []))
    for one in below:  # grows while it is walked: children of children
        below += by_parent.get(one.pid, [])
    return below


def _read(entry: Path) -> ChildProcess | None:
    try:
        # "pid (name) state ppid ...": the name may hold spaces and brackets
        name, _, rest = entry.joinpath("stat").read_text("utf-8", errors="replace").rpartition(")")
        command = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended meanwhile, or is not ours to read
        return None
    fields = rest.split()
    ticks = int(fields[11]) + int(fields[12])  # user and system time
    return ChildProcess(
        pid=int(entry.name),
        parent=int(fields[1]),
        state=_STATES.get(fields[0], fields[0]),
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        command=(command.strip() or name.partition("(")[2])[:_LONGEST_COMMAND],
    )
