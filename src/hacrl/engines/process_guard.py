"""Ends an engine's processes if hacrl is killed and cannot: vLLM's own outlive whoever started them.

The file is also the guard's program. It runs beside hacrl as a small process, so it imports next to nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

LOOK_EVERY = 0.5
END_SECONDS = 5.0  # time to end by itself before it is killed


class Guard:
    """Watches over processes, by id, and process groups, by id with a minus sign, while there is one."""

    def __init__(self, targets: Sequence[int]) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, targets)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # what ends hacrl, such as Ctrl-C, must not end its guard first
        )

    def end(self) -> None:
        """No longer needed."""
        self._process.kill()
        self._process.wait()


def watch(parent: int, targets: Sequence[int]) -> None:
    """Until the targets are gone; if the parent goes first, end them."""
    while os.getppid() == parent:
        if not _any_left(targets):
            return
        time.sleep(LOOK_EVERY)
    _signal(targets, signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    while _any_left(targets) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY)
    _signal(targets, signal.SIGKILL)


def _any_left(targets: Sequence[int]) -> bool:
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, 0)
            return True
    return False


def _signal(targets: Sequence[int], number: signal.Signals) -> None:
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, number)


if __name__ == "__main__":
    watch(int(sys.argv[1]), [int(target) for target in sys.argv[2:]])
