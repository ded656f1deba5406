"""Run untrusted Python code in a process that can do nothing but compute and print.

What the sandbox prevents, by limits and a filter of system calls that the kernel enforces (seccomp):

=================  ==========================================================================================
endless loops      a limit on CPU time, and one on wall time, after which the process is killed
memory             a limit on the address space: Python raises MemoryError
files              no file can be opened, neither for reading nor for writing: no data, no secrets, no devices
processes          neither a process nor a thread can be started; no signal can be sent
network            no socket can be made
environment        the process starts with empty environment variables, and in a fresh interpreter
output             a limit on what is read; the process is killed beyond it
=================  ==========================================================================================

What it does not prevent: the code may use its CPU time and memory in full, read the clock, and exploit a
hole in the kernel's allowed system calls, in which case the limits above no longer hold. Code that somebody
wrote to attack the machine needs a virtual machine around the run.

The sandbox needs Linux on x86_64 or aarch64. Elsewhere :func:`check_sandbox` raises an error.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hacrl.environments.bundled import sandbox_child
from hacrl.errors import TaskError

START_SECONDS = 60.0  # for a process to start on a busy machine; not part of the code's time
LONGEST_CODE = 15_000  # characters: in UTF-8 at most 60,000 bytes, which a pipe holds
CUT_MARK = "\n[output cut]"


@dataclass(frozen=True)
class SandboxLimits:
    """What a piece of code may use."""

    cpu_seconds: int = 2
    wall_seconds: float = 10.0
    memory_mb: int = 512
    output_characters: int = 2000

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "wall_seconds", "memory_mb", "output_characters"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise TaskError(f"{name}={value!r}: must be a number above 0")


@dataclass(frozen=True)
class CodeResult:
    """What the code printed, with its error message if it raised; and why it was ended, if it was."""

    output: str
    ended: str = ""  # "" or e.g. "it used more than 2 s of CPU time"

    def as_text(self) -> str:
        """Return both as one text for a model."""
        text = self.output.rstrip("\n") or ("" if self.ended else "(no output)")
        return "\n".join(part for part in (text, f"[stopped: {self.ended}]" if self.ended else "") if part)


class SandboxUnavailableError(RuntimeError):
    """This machine cannot run the sandbox; the message says why."""


def run_code(code: str, limits: SandboxLimits) -> CodeResult:
    """Run the code in a new process and return what it printed. No code makes this raise.

    Raise :class:`SandboxUnavailableError` if the process cannot start or cannot give up its rights.
    """
    if len(code) > LONGEST_CODE:
        return CodeResult("", f"the code is longer than {LONGEST_CODE} characters")
    command = [sys.executable, "-S", "-P", "-B", str(Path(sandbox_child.__file__).resolve())]
    command += [str(math.ceil(limits.cpu_seconds)), str(int(limits.memory_mb * 2**20))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},  # sets print in the same order every time
        cwd="/",
        start_new_session=True,
        bufsize=0,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        try:
            process.stdin.write(code.encode("utf-8", "replace"))
            process.stdin.close()
        except BrokenPipeError:  # it has ended; what it wrote says why
            pass
        _wait_until_ready(process)
        return _read(process, limits)
    finally:
        _kill(process)


def check_sandbox() -> None:
    """Run a line of code. Raise TaskError if this machine cannot run the sandbox."""
    try:
        result = run_code("print(6 * 7)", SandboxLimits())
    except SandboxUnavailableError as error:
        raise TaskError(
            f"task: Python code cannot be run safely on this machine: {error}. The sandbox needs Linux on "
            "x86_64 or aarch64, and seccomp"
        ) from error
    if result.output.strip() != "42":
        raise TaskError(f"task: the Python sandbox does not work on this machine: {result.as_text()!r}")


def _wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    fd = process.stdout.fileno()
    first = os.read(fd, 1) if _is_readable(fd, START_SECONDS) else b""
    if first == sandbox_child.READY:
        return
    message = b""
    while first and len(message) < 10_000 and _is_readable(fd, 1.0) and (chunk := os.read(fd, 4096)):
        message += chunk
    lines = (first + message).decode("utf-8", "replace").strip().splitlines()
    raise SandboxUnavailableError(lines[-1] if lines else "its process does not start")


def _read(process: subprocess.Popen[bytes], limits: SandboxLimits) -> CodeResult:
    """Read what the code prints until it ends, prints too much, or takes too long."""
    assert process.stdout is not None
    fd = process.stdout.fileno()
    deadline = time.monotonic() + limits.wall_seconds
    data = bytearray()
    longest = 4 * limits.output_characters  # bytes of a character in UTF-8
    while len(data) <= longest:
        if not _is_readable(fd, deadline - time.monotonic()):
            return CodeResult(_text(data, limits), f"it ran for more than {limits.wall_seconds:g} s")
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        data += chunk
    else:
        return CodeResult(_text(data, limits), "it printed too much")
    try:
        code = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:  # it closed its output and went on
        return CodeResult(_text(data, limits), f"it ran for more than {limits.wall_seconds:g} s")
    return CodeResult(_text(data, limits), _why(code, limits))


def _why(code: int, limits: SandboxLimits) -> str:
    if code >= 0:
        return ""  # an exit code is the code's own, or 1 after an error that it printed
    if -code in (signal.SIGXCPU, signal.SIGKILL):
        return f"it used more than {math.ceil(limits.cpu_seconds)} s of CPU time"
    return f"its process died ({signal.Signals(-code).name})"


def _text(data: bytearray, limits: SandboxLimits) -> str:
    text = data.decode("utf-8", "replace")
    if len(text) <= limits.output_characters:
        return text
    return text[: limits.output_characters] + CUT_MARK


def _is_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
