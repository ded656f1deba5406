"""A vLLM server as a child process: started, waited for, watched, and ended with all it started itself."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hacrl.rollout.vllm.backend import EngineError, EngineLostError

POLL_SECONDS = 0.2
END_SECONDS = 15.0  # time to end by itself before it is killed
SHOWN_LINES = 12
_PR_SET_PDEATHSIG = 1


class ServerProcess:
    """One server and its log. It is in a process group of its own, so that it ends as a whole."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        start_timeout: float,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = dict(environment)
        self._start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id, while there is one."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process is there; it need not be ready."""
        return self._process is not None and self._process.poll() is None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start it and wait until it is ready; what an earlier one left behind is ended first."""
        self.end()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        deadline = time.monotonic() + self._start_timeout
        while not is_ready():
            if not self.is_alive():
                code = self._process.returncode
                self.end()
                raise EngineError(f"{self.name} does not start (exit code {code}); {self._log_end()}")
            if time.monotonic() > deadline:
                self.end()
                raise EngineLostError(
                    f"{self.name} was not ready after {self._start_timeout:g} s (start_timeout); "
                    f"{self._log_end()}"
                )
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        """End the server and its children, gently at first."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        _signal_group(process.pid, signal.SIGKILL)  # what did not end, or was left without its parent
        process.wait()

    def _log_end(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "error:" in line][-4:]
        shown = "\n  ".join(telling or lines[-SHOWN_LINES:])
        return f"its log {self.log} ends with:\n  {shown}"


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _end_with_parent() -> None:
    """Linux: the kernel ends the server if hacrl is killed and cannot."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
