"""Child processes: start them, wait for them, exchange messages with them, end all that they started.

Every child leads a process group of its own: Ctrl-C reaches hacrl alone, which then ends its children, each
with its whole group. ``MessageProcess`` serves untrusted work: it may be killed at any moment.
``SupervisedProcess`` runs a program with a log; a guard ends that program even if hacrl is killed.

This module imports the standard library alone. Workers import it, and the guard runs it as its program.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LONGEST_MESSAGE = 1_000_000  # bytes; two answers of 2,000 characters are far from it
LENGTH_BYTES = 4
POLL_SECONDS = 0.2  # between checks whether a program is ready
TERMINATE_SECONDS = 15.0  # from SIGTERM to SIGKILL
CLEANUP_SECONDS = 2.0  # for a program's own children to end after it
EXIT_SECONDS = 2.0  # from the end of a connection to the exit of the process
LOG_LINES = 12  # of a log, in messages
GUARD_POLL_SECONDS = 0.5
GUARD_TERMINATE_SECONDS = 5.0


class ProcessError(RuntimeError):
    """A program does not start; the message says why."""


class ProcessLostError(ProcessError):
    """A program was not ready in time or was ended meanwhile; starting it again may help."""


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of hacrl.

    A plain command, because children of multiprocessing would import the user's script again. ``-P`` keeps
    modules of the working directory from replacing installed ones.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def python_environment(**variables: str) -> dict[str, str]:
    """Return this environment with hacrl's own folder first in PYTHONPATH, and the given variables."""
    root = str(Path(__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        **variables,
    }


def send_message(fd: int, message: Mapping[str, Any]) -> None:
    """Write one message: JSON after its length in four bytes. Raise BrokenPipeError if no reader is left."""
    body = json.dumps(message).encode("ascii")  # escapes everything else, lone surrogates too
    data = len(body).to_bytes(LENGTH_BYTES, "big") + body
    while data:
        data = data[os.write(fd, data) :]


def receive_message(fd: int, longest: int = LONGEST_MESSAGE) -> dict[str, Any] | None:
    """Read one message. Return None at the end of the stream, or for a length out of range."""
    header = _read_exactly(fd, LENGTH_BYTES)
    length = 0 if header is None else int.from_bytes(header, "big")
    body = _read_exactly(fd, length) if 0 < length <= longest else None
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(fd, count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


class MessageProcess:
    """A module of hacrl in a child process, with messages over its stdin and stdout.

    Not safe for several threads at once. The process ends with this object. After a fork, only the parent
    may end it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], keeps_errors: bool = False
    ) -> None:
        """Start the process; raise OSError if the system cannot. ``keeps_errors``: for :meth:`last_error`."""
        self._errors = tempfile.TemporaryFile() if keeps_errors else None  # noqa: SIM115 - closed by kill
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors or subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        # Ends the process and all that it started, at once. May be called more than once.
        self.kill = weakref.finalize(self, _kill_at_once, self._process, self._errors, os.getpid())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for the signal that ended the process; None while it runs."""
        return self._process.poll()

    @property
    def reply_fd(self) -> int:
        """The file descriptor that becomes readable when a reply arrives or the process ends."""
        return self._replies.fileno()

    def has_reply(self, timeout: float | None = 0.0) -> bool:
        """Wait up to ``timeout`` seconds (None: for ever); return whether :meth:`receive` would not block."""
        poll = select.poll()  # select.select fails beyond file descriptor 1023
        poll.register(self.reply_fd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def send(self, message: Mapping[str, Any]) -> bool:
        """Write a message. Return False if the process has ended."""
        if self.exit_code is not None:
            return False
        try:
            send_message(self._requests.fileno(), message)
        except BrokenPipeError:
            return False
        return True

    def receive(self, longest: int = LONGEST_MESSAGE) -> dict[str, Any] | None:
        """Wait for the next reply; return None if the process has ended."""
        return receive_message(self.reply_fd, longest)

    def last_error(self) -> str:
        """Return the last line on stderr, at most 300 characters; empty if there is none."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""


def _kill_at_once(process: subprocess.Popen[bytes], errors: IO[bytes] | None, owner: int) -> None:
    if os.getpid() != owner:
        return
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()
    for file in (process.stdin, process.stdout, errors):
        if file is not None:
            file.close()


class SupervisedProcess:
    """A program that may be started again, with its log and a guard."""

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
        self._log_start = 0  # where the present process's part of the log begins

    @property
    def pid(self) -> int | None:
        """The process id, or None if there is no process."""
        return None if self._process is None else self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process runs; it need not be ready."""
        return self._process is not None and self._process.poll() is None

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start the program and wait until it is ready. End what an earlier one left behind first."""
        self.end()
        if is_ready():  # weights must not go to another run's server
            raise ProcessError(f"{self.name} cannot start: another server answers at its address already")
        self.launch()
        self.wait_until_ready(is_ready)

    def launch(self, inherited_fd: int | None = None) -> None:
        """Start the program without waiting. End what an earlier one left behind first.

        The program inherits ``inherited_fd``; the descriptor's number is the last argument of its command.
        """
        self.end()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            process = self._process = subprocess.Popen(
                self._command if inherited_fd is None else [*self._command, str(inherited_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                process_group=0,  # no session: the scheduler would give that its own share of the CPU
                pass_fds=() if inherited_fd is None else (inherited_fd,),
            )
        self._guard = Guard([-process.pid])

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait for at most ``start_timeout`` seconds; raise if the process ends or is not ready by then."""
        process = self._process
        deadline = time.monotonic() + self._start_timeout
        while not is_ready():
            if process is None:
                raise ProcessLostError(f"{self.name} was ended before it was ready.")
            if process.poll() is not None:
                self.end()
                raise ProcessError(
                    f"{self.name} does not start (exit code {process.returncode}); {self.end_of_log()}"
                )
            if time.monotonic() > deadline:
                self.end()
                raise ProcessLostError(
                    f"{self.name} was not ready after {self._start_timeout:g} s; {self.end_of_log()}"
                )
            time.sleep(POLL_SECONDS)

    def end(self, patience: float = 0.0) -> None:
        """End the process and its children: wait ``patience`` seconds, send SIGTERM, at last SIGKILL."""
        process, self._process = self._process, None
        guard, self._guard = self._guard, None
        if process is None:
            return
        try:
            _wait(process, patience)
            _signal_group(process.pid, signal.SIGTERM)
            _wait(process, TERMINATE_SECONDS)
            deadline = time.monotonic() + CLEANUP_SECONDS
            while _signal_group(process.pid, 0) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS / 10)
        finally:  # also if the user interrupts the waiting
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            if guard is not None:
                guard.end()

    def why_ended(self) -> str:
        """Return how the process ended, for messages."""
        process = self._process
        if process is None:
            return "it was ended"
        _wait(process, EXIT_SECONDS)
        code = "" if process.returncode is None else f" (exit code {process.returncode})"
        return f"its process is gone{code}"

    def end_of_log(self) -> str:
        """Return the lines of the log that tell most, for messages: its last errors, else its last lines."""
        written = self.log.read_bytes()[self._log_start :]
        lines = written.decode("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line][-4:]
        shown = "\n  ".join(errors or lines[-LOG_LINES:])
        return f"its log {self.log} ends with:\n  {shown}" if shown else f"its log {self.log} is empty"


class Guard:
    """A small process that ends others if hacrl is killed and cannot: some programs outlive their parent.

    A target is a process id, or a process group's id with a minus sign.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, targets)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # the guard must outlive whatever ends hacrl, such as Ctrl-C
        )

    @property
    def pid(self) -> int:
        """The guard's own process id."""
        return self._process.pid

    def end(self) -> None:
        """Dismiss the guard; its targets go on."""
        self._process.kill()
        self._process.wait()


def watch(parent: int, targets: Sequence[int]) -> None:
    """Return when all targets have ended. If the parent ends first, end the targets."""
    while os.getppid() == parent:
        if not _any_left(targets):
            return
        time.sleep(GUARD_POLL_SECONDS)
    _signal_all(targets, signal.SIGTERM)
    deadline = time.monotonic() + GUARD_TERMINATE_SECONDS
    while _any_left(targets) and time.monotonic() < deadline:
        time.sleep(GUARD_POLL_SECONDS)
    _signal_all(targets, signal.SIGKILL)


def _any_left(targets: Sequence[int]) -> bool:
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, 0)
            return True
    return False


def _signal_all(targets: Sequence[int], number: signal.Signals) -> None:
    for target in targets:
        with suppress(ProcessLookupError):
            os.kill(target, number)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal, 0 for none; return whether the group has a process."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), [int(target) for target in sys.argv[2:]])
