"""The two processes of an episode: the environment's, and a supervisor that forwards messages and ends it.

The pool holds the other end of the supervisor's socket and no process id: closing the socket ends the
episode. The supervisor trusts nothing that comes from the environment's process: it forwards complete replies
of a bounded length, and kills the whole process tree when a limit is passed, the process ends or the pool
closes the socket.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from hacrl.environments.channel import Channel, MessageTooLongError
from hacrl.environments.interface import EnvironmentLimits
from hacrl.environments.player import Player
from hacrl.environments.process_tree import (
    become_subreaper,
    descendants,
    end_with_parent,
    kill_descendants,
    remove_folder,
)
from hacrl.processes import receive_message, send_message

REPLY, FAILURE = b"r", b"f"  # the first byte of a message to the pool: from the environment, or about it
SECONDS = struct.Struct("!d")  # before a request: its limit; after the first byte of a reply: what it took
LONGEST_REQUEST = 2**30  # bytes
LONGEST_REPLY = 2**26
CLEANUP_SECONDS = 5.0  # for killed processes to be gone
EXIT_SECONDS = 1.0  # from the end of a connection to the end of its process
NICENESS = 5  # the trainer and the supervisors come first
_FIRST_CHECK, _LAST_CHECK = 0.05, 1.0  # seconds between counts of processes, which double


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What an episode is started with."""

    factory: Callable[..., Any]
    options: Mapping[str, Any]
    limits: EnvironmentLimits
    folder: str  # for temporary files; made for the episode and removed with it


def supervise(connection: socket.socket, setup: EpisodeSetup, close_first: list[int]) -> NoReturn:
    """Play one episode in a child process, and end this process with it. Called after a fork.

    ``close_first``: file descriptors of the parent process.
    """
    os.setsid()
    become_subreaper()
    for fd in close_first:
        os.close(fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    own, other = socket.socketpair()
    parent = os.getpid()
    os.mkdir(setup.folder, 0o700)
    try:
        child = os.fork()
    except OSError as error:
        Channel(connection, 0).send(start_failure(error))
        os._exit(1)
    if child == 0:
        connection.close()
        own.close()
        _play(other, parent, setup)
    other.close()
    supervisor = _Supervisor(Channel(connection, LONGEST_REQUEST), Channel(own, LONGEST_REPLY), child, setup)
    supervisor.serve()
    os._exit(0)


def start_failure(error: OSError) -> bytes:
    """Return the message to the pool that the processes of an episode cannot be started."""
    return _failure_message(f"cannot start a process: {error.strerror}", "crash", 0.0)


def _failure_message(failure: str, kind: str, seconds: float) -> bytes:
    body = json.dumps({"failure": failure, "kind": kind}).encode("ascii")
    return FAILURE + SECONDS.pack(seconds) + body


def _play(connection: socket.socket, parent: int, setup: EpisodeSetup) -> NoReturn:
    """Answer calls until the connection ends."""
    try:
        os.setsid()
        end_with_parent(parent)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        os.nice(NICENESS)
        _limit_memory(setup.limits.memory)
        tempfile.tempdir = os.environ["TMPDIR"] = setup.folder
        longest = setup.limits.observation_characters
        player = Player(setup.factory, setup.options, longest, seeds_global_generators=True)
        fd = connection.fileno()
        while (message := receive_message(fd, LONGEST_REQUEST)) is not None:
            send_message(fd, player.answer(message))
        os._exit(0)
    finally:
        os._exit(1)


def _limit_memory(limit: float | None) -> None:
    """Limit the address space to what is in use and ``limit`` GiB; be the first whom the kernel kills."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass  # a container may forbid this; the limit below does not depend on it
    if limit is not None:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + int(limit * 2**30)
        inherited = resource.getrlimit(resource.RLIMIT_AS)[1]
        if inherited == resource.RLIM_INFINITY or most < inherited:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))


class _Supervisor:
    """Forwards between the pool and one environment, and keeps the clock."""

    def __init__(self, pool: Channel, player: Channel, child: int, setup: EpisodeSetup) -> None:
        self._pool, self._player, self._child = pool, player, child
        self._limits, self._folder = setup.limits, setup.folder
        self._began: float | None = None  # when the call under way began
        self._limit = 0.0  # seconds that it may take
        self._next_check, self._check_gap = 0.0, _FIRST_CHECK
        self._pid_fd: int | None = None
        with suppress(OSError):  # a kernel without it: the end of the connection tells as much
            self._pid_fd = os.pidfd_open(child)

    def serve(self) -> None:
        """Serve until the pool closes the socket or the episode fails; then leave no process behind."""
        failure = ""
        is_late = False
        try:
            while not failure and not is_late and not self._pool.is_at_end:
                self._wait()
                self._forward_requests()
                failure = self._forward_reply() or self._exit_failure() or self._count_failure()
                is_late = self._began is not None and self._seconds() >= self._limit
        finally:
            with suppress(OSError):  # a process that has just started has no group yet
                os.killpg(self._child, signal.SIGKILL)  # all at once: they may fork all the time
            is_clean = kill_descendants(CLEANUP_SECONDS)
        if failure and not is_clean:
            failure += "; some of its processes could not be ended"
        if failure or is_late:
            kind = "crash" if failure else "timeout"
            self._pool.send(_failure_message(failure, kind, self._seconds()))
            self._flush()
        remove_folder(self._folder)

    def _flush(self) -> None:
        poll = select.poll()
        poll.register(self._pool.fileno(), select.POLLOUT)
        deadline = time.monotonic() + CLEANUP_SECONDS
        while self._pool.wants_to_write and time.monotonic() < deadline:
            poll.poll(CLEANUP_SECONDS * 1000)
            self._pool.flush()

    def _seconds(self) -> float:
        """Return how long the call under way has run."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    def _wait(self) -> None:
        """Wait for a message, the end of the process, or the next time something must be checked."""
        poll = select.poll()
        pool_events = select.POLLOUT if self._pool.wants_to_write else 0
        poll.register(self._pool.fileno(), pool_events | select.POLLIN)
        player_events = select.POLLOUT if self._player.wants_to_write else 0
        poll.register(self._player.fileno(), player_events | select.POLLIN)
        if self._pid_fd is not None:
            poll.register(self._pid_fd, select.POLLIN)
        now = time.monotonic()
        until = self._next_check
        if self._began is not None:
            until = min(until, self._began + self._limit)
        poll.poll(max(0.0, until - now) * 1000 + 1)
        self._pool.flush()
        self._player.flush()

    def _forward_requests(self) -> None:
        while (request := self._pool.receive()) is not None:
            (self._limit,) = SECONDS.unpack_from(request)
            self._player.send(request[SECONDS.size :])
            self._began = time.monotonic()
            self._check_gap = _FIRST_CHECK
            self._next_check = self._began + self._check_gap

    def _forward_reply(self) -> str:
        """Forward a reply; return what is wrong with what the process has sent."""
        try:
            reply = self._player.receive()
        except MessageTooLongError:
            return "sent more than a reply can be"
        if reply is None:
            return ""
        if self._began is None:
            return "wrote to the connection of its process without having been asked"
        seconds = self._seconds()
        self._began = None
        self._pool.send(REPLY + SECONDS.pack(seconds) + reply)
        return ""

    def _exit_failure(self) -> str:
        """Return how the process ended, if it has ended or closed its connection."""
        deadline = time.monotonic() + EXIT_SECONDS
        # Not reaped here: the id of the process must remain that of its group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (ended := os.waitid(os.P_PID, self._child, options)) is None:
            if not self._player.is_at_end:
                return ""
            if time.monotonic() > deadline:
                return "closed the connection of its process"
            time.sleep(0.001)  # files are closed a little before a process counts as ended
        if ended.si_code == os.CLD_EXITED:
            return f"ended its process (exit code {ended.si_status})"
        hint = ": perhaps for want of memory" if ended.si_status == signal.SIGKILL else ""
        return f"died (signal {ended.si_status}{hint})"

    def _count_failure(self) -> str:
        """Count the episode's processes, from time to time."""
        now = time.monotonic()
        if now < self._next_check:
            return ""
        self._check_gap = min(2 * self._check_gap, _LAST_CHECK)
        self._next_check = now + self._check_gap
        limit = self._limits.processes
        if len(descendants(os.getpid(), limit)) <= limit:
            return ""
        return f"started more than {limit} processes (the limit is processes)"
