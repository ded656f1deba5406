"""vLLM as a child process: started, waited for, watched, and ended with all it started itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hacrl.engines.process_guard import Guard
from hacrl.engines.vllm.backend import EngineError, EngineLostError

POLL_SECONDS = 0.2
END_SECONDS = 15.0  # time to end by itself before it is killed
TIDY_SECONDS = 2.0  # and for its children, once it has ended
LAST_SECONDS = 2.0  # between the end of a connection and that of the process
SHOWN_LINES = 12


class OwnProcess:
    """One engine and its log. It is in a process group of its own, so that it ends as a whole."""

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
        self._guard: Guard | None = None
        self._log_begins = 0  # where in the log the present one begins

    @property
    def pid(self) -> int | None:
        """The process id, while there is one."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Whether the process is there; it need not be ready."""
        return self._process is not None and self._process.poll() is None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start it and wait until it is ready; what an earlier one left behind is ended first."""
        self.end()
        if is_ready():  # ours is not there yet: weights must not go to somebody else's
            raise EngineError(f"{self.name} cannot start: another server answers at its address already")
        self.launch()
        self.wait_until(is_ready)

    def launch(self, inherits: int | None = None) -> None:
        """Start it and do not wait; what an earlier one left behind is ended first.

        It may inherit a file descriptor, whose number is its last argument.
        """
        self.end()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_begins = log.tell()
            process = self._process = subprocess.Popen(
                self._command if inherits is None else [*self._command, str(inherits)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                process_group=0,
                pass_fds=() if inherits is None else (inherits,),
            )
        self._guard = Guard([-process.pid])

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Or until it has ended, or ``start_timeout`` seconds from now."""
        process = self._process
        deadline = time.monotonic() + self._start_timeout
        while not is_ready():
            if process is None:
                raise EngineLostError(f"{self.name} was ended before it was ready.")
            if process.poll() is not None:
                self.end()
                raise EngineError(
                    f"{self.name} does not start (exit code {process.returncode}); {self.log_end()}"
                )
            if time.monotonic() > deadline:
                self.end()
                raise EngineLostError(
                    f"{self.name} was not ready after {self._start_timeout:g} s (start_timeout); "
                    f"{self.log_end()}"
                )
            time.sleep(POLL_SECONDS)

    def end(self, patience: float = 0.0) -> None:
        """End it and its children, gently at first; one that is about to end by itself is given time to."""
        process, self._process = self._process, None
        guard, self._guard = self._guard, None
        if process is None:
            return
        try:
            _wait(process, patience)
            _signal_group(process.pid, signal.SIGTERM)
            _wait(process, END_SECONDS)
            deadline = time.monotonic() + TIDY_SECONDS  # in which its children clean up after it
            while _signal_group(process.pid, 0) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 10)
        finally:  # even if somebody has had enough of waiting
            _signal_group(process.pid, signal.SIGKILL)  # what did not end, or was left without its parent
            process.wait()
            if guard is not None:
                guard.end()

    def last_words(self) -> str:
        """Of one that has died, for messages."""
        return f"{self.how_it_ended()}, its log is {self.log}"

    def how_it_ended(self) -> str:
        """The same without its log."""
        process = self._process
        if process is None:
            return "it was ended"
        _wait(process, LAST_SECONDS)
        code = "" if process.returncode is None else f" (exit code {process.returncode})"
        return f"its process is gone{code}"

    def log_end(self) -> str:
        """What it said last, for messages."""
        written = self.log.read_bytes()[self._log_begins :]
        lines = written.decode("utf-8", errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "error:" in line][-4:]
        shown = "\n  ".join(telling or lines[-SHOWN_LINES:])
        return f"its log {self.log} ends with:\n  {shown}" if shown else f"its log {self.log} is empty"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anybody; 0 is no signal."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False
