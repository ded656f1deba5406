"""Environments that misbehave in every way that a process can; the tests play them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

FOREVER = 1000.0


def raise_error() -> None:
    raise ValueError("no \x1b[31msuch\x1b[0m level")


def exit_python() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def sleep() -> None:
    time.sleep(FOREVER)


def ignore_signals_and_spin() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_at_once() -> None:
    os._exit(7)


def exit_as_if_all_were_well() -> None:
    os._exit(0)


def abort() -> None:
    os.abort()


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(1)


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(FOREVER)


def terminate_parent() -> None:
    """The supervisor ignores what can be ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(os.getppid(), number)
    os._exit(5)


def stop_parent() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(FOREVER)


def kill_parent_and_leave_daemon() -> None:
    leave_daemon()
    kill_parent()


def kill_grandparent() -> None:
    """End the process that forks all episodes."""
    _kill_parent_of(os.getppid())
    os._exit(9)


def kill_all_who_could_clean_up() -> None:
    leave_daemon()
    _kill_parent_of(os.getppid())
    kill_parent()


def _kill_parent_of(pid: int) -> None:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)


def leave_child() -> None:
    if os.fork() == 0:
        time.sleep(FOREVER)


def leave_daemon() -> None:
    """A process without a parent, in a session of its own, that holds all file descriptors."""
    if os.fork() == 0:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(FOREVER)
        os._exit(0)
    os.wait()


def leave_program() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)


def leave_daemon_and_exit() -> None:
    leave_daemon()
    os._exit(6)


def bomb() -> None:
    while True:
        with contextlib.suppress(OSError):
            os.fork()


def bomb_in_own_sessions() -> None:
    while True:
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                os.setsid()


def fill_memory() -> None:
    held = []
    while True:
        held.append(bytearray(2**24))


def fill_memory_and_catch() -> None:
    """An environment that swallows the error, and needs memory to answer."""
    held = []
    with contextlib.suppress(MemoryError):
        while True:
            held.append(bytearray(2**12))
    while True:
        time.sleep(1)


def close_everything() -> None:
    os.closerange(0, 256)


def close_everything_and_sleep() -> None:
    close_everything()
    time.sleep(FOREVER)


def write_everywhere() -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, b"\0\0\0\x05junk!" * 3)


def write_nested_json() -> None:
    body = b"[" * 200_000
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, len(body).to_bytes(4, "big") + body)


def announce_a_long_message() -> None:
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, b"\xff\xff\xff\xff")


def write_from_a_thread() -> None:
    def write() -> None:
        while True:
            write_everywhere()

    threading.Thread(target=write, daemon=True).start()


def close_standard_streams() -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(fd)


def print_a_lot() -> None:
    print("out" * 100_000, flush=True)
    sys.stderr.write("error" * 100_000)
    os.write(1, b"x" * 100_000)
    subprocess.run(["echo", "from a program"], check=True)


def leave_files() -> None:
    with open(os.path.join(tempfile.mkdtemp(), "big"), "wb") as file:
        file.write(b"x" * 1000)


def leave_nested_folders() -> None:
    os.chdir(tempfile.gettempdir())
    for _ in range(1100):
        os.mkdir("in")
        os.chdir("in")


def open_sockets() -> None:
    """What the episode inherited: nothing of other episodes, of the supervisor or of the zygote."""
    sockets = []
    for fd in range(256):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                sockets.append(fd)
    assert len(sockets) == 3, sockets  # one leads to the supervisor, two are of the event loop


async def wait_for_ever() -> None:
    await asyncio.sleep(FOREVER)


class BadText:
    """An error whose text cannot be had."""

    class Error(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def __call__(self) -> None:
        raise self.Error


ATTACKS: dict[str, Callable[[], Any]] = {
    name: value for name, value in globals().items() if callable(value) and value.__module__ == __name__
} | {"bad_text": BadText()}


class Hostile:
    """Attack in ``reset``, in a tool or in ``get_reward``, as the row says; otherwise count calls."""

    def __init__(self, at_once: str = "") -> None:
        if at_once:
            ATTACKS[at_once]()
        self.count = 0
        self.where = self.attack = ""

    async def _attack(self, where: str) -> None:
        if where == self.where:
            result = ATTACKS[self.attack]()
            if asyncio.iscoroutine(result):
                await result

    async def reset(self, where: str = "", attack: str = "", **row: Any) -> str:
        self.where, self.attack = where, attack
        await self._attack("reset")
        return f"pid {os.getpid()}"

    async def call(self) -> int:
        """Count the calls."""
        self.count += 1
        await self._attack("tool")
        return self.count

    async def get_reward(self) -> float:
        await self._attack("reward")
        return float(self.count)


class Values:
    """Return a value of any kind from any method."""

    values: ClassVar[dict[str, Any]] = {
        "list": ["a"],
        "nan": float("nan"),
        "text": "high",
        "error": "error",
        "none": None,
        "escapes": "\x1b[2J\x1b]0;title\x07\u202e\0\ud800\udc00 \U0001f600 end",
    }

    def reset(self, where: str, value: str) -> Any:
        self.where = where
        self.value = "x" * 100_000_000 if value == "long" else self.values[value]
        return self.value if where == "reset" else None

    def get(self) -> Any:
        """Return the value."""
        return self.value

    def get_reward(self) -> Any:
        if self.value == "error":
            return 1 / 0
        return self.value if self.where == "reward" else 0


class TextValues:
    """The same for the text form."""

    def reset(self, value: Any = None, **row: Any) -> None:
        self.value = value

    def observe(self) -> str:
        return "begin"

    def step(self, text: str) -> Any:
        return eval(text)


def make_anything(name: str) -> object:
    """Make one of the two."""
    return {"Values": Values, "TextValues": TextValues}[name]()
