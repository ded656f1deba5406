"""All processes of one episode: adopt them, count them, end them, and remove their files. Linux only.

A process that sets itself as the subreaper becomes the parent of every descendant whose own parent ends. So a
daemon that an environment leaves behind is still found, and no process id is ever reused before it is reaped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def become_subreaper() -> None:
    """Make this process the parent of orphans among its descendants."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process once its parent ends; end at once if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def descendants(pid: int, at_most: int | None = None) -> list[int]:
    """Return the ids of all processes below a process; stop beyond ``at_most`` of them."""
    found: list[int] = []
    waiting = [pid]
    while waiting and (at_most is None or len(found) <= at_most):
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def _children(pid: int) -> list[int]:
    if not _LISTS_CHILDREN:
        return _children_by_parent(pid)
    children: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children += map(int, file.read().split())
    return children


def _children_by_parent(pid: int) -> list[int]:
    """Look at the parent of every process: slower, for kernels that do not list children."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                # "PID (NAME) STATE PARENT ...", where the name may contain anything
                if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                    children.append(int(entry))
    return children


def is_stopped(pid: int) -> bool:
    """Return whether a process has been stopped by a signal."""
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"T"
    return False


def kill_descendants(seconds: float, spared: frozenset[int] = frozenset()) -> bool:
    """Kill and reap all descendants of this process, the subreaper; return whether none is left.

    ``spared``: children that are neither killed nor reaped, nor what they started.
    """
    deadline = time.monotonic() + seconds
    while True:
        children = [child for child in _children(os.getpid()) if child not in spared]
        if not children:
            return True
        for child in children:
            for pid in (child, *descendants(child)):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)


def remove_folder(folder: str) -> None:
    """Remove a folder of untrusted content."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # thousands of folders within folders, which the program can remove
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL)


def kill_marked(variable: str, value: str) -> int:
    """Kill all processes that were started with this environment variable; return their number."""
    mark = f"{variable}={value}".encode("ascii")
    killed = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    os.kill(int(entry), signal.SIGKILL)
                    killed += 1
    return killed
