"""Episodes in processes, as the pool sees them: one zygote per environment, one socket per episode."""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hacrl.environments.channel import Channel, MessageTooLongError
from hacrl.environments.interface import EnvironmentLimits
from hacrl.environments.process_tree import is_stopped, kill_marked, remove_folder
from hacrl.environments.replies import Reply
from hacrl.environments.supervisor import FAILURE, LONGEST_REPLY, SECONDS
from hacrl.environments.zygote import LONGEST_PACKET, NUMBER_BYTES
from hacrl.errors import TaskError
from hacrl.processes import python_command, python_environment

START_LIMIT = 300.0  # seconds to import an environment's module, on a busy machine
END_SECONDS = 10.0  # for a zygote and all that it started to end
GRACE_SECONDS = 30.0  # beyond a call's limit, which the supervisor keeps unless it is stopped itself
MARK = "HACRL_ENVIRONMENT_POOL"  # environment variable of a zygote and of all that it starts


class ProcessEpisode:
    """An episode in a process tree of its own."""

    grace = GRACE_SECONDS

    def __init__(self, zygote: ProcessBackend, number: int, connection: socket.socket) -> None:
        self._zygote, self._number = zygote, number
        self._channel = Channel(connection, LONGEST_REPLY + SECONDS.size + 1)

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a reply arrives."""
        return self._channel.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether :meth:`send` has not written everything yet."""
        return self._channel.wants_to_write

    def send(self, message: Mapping[str, Any], limit: float) -> None:
        """Send a call without waiting."""
        self._channel.send(SECONDS.pack(limit) + json.dumps(message).encode("ascii"))

    def receive(self) -> Reply | None:
        """Write what is left; return the reply or the failure if it has arrived."""
        self._channel.flush()
        try:
            body = self._channel.receive()
        except MessageTooLongError:
            return Reply(failure="sent more than a reply can be", kind="crash")
        if body is None:
            return Reply(failure="lost its supervisor", kind="crash") if self._channel.is_at_end else None
        (seconds,) = SECONDS.unpack_from(body, 1)
        try:
            content = json.loads(body[1 + SECONDS.size :])
        except (ValueError, RecursionError):  # an environment can write anything
            content = None
        if not isinstance(content, dict):
            return Reply(failure="sent something else than a reply", kind="crash")
        if body[:1] == FAILURE:
            return Reply(failure=content["failure"], kind=content["kind"], seconds=seconds)
        return Reply(content, seconds=seconds)

    def end(self) -> None:
        """End the episode: its supervisor kills all its processes once the socket is closed."""
        self._channel.close()

    def kill_supervisor(self) -> None:
        """End an episode whose supervisor does not obey; the zygote kills what is left."""
        self._channel.close()
        self._zygote.kill(self._number)


class ProcessBackend:
    """Starts episodes of one environment by forking a process that has imported it."""

    def __init__(
        self, reference: str, options: Mapping[str, Any], limits: EnvironmentLimits, key: str
    ) -> None:
        """Prepare; nothing is started before :meth:`new_episode`."""
        self._setup = {
            "reference": reference,
            "key": key,
            "options": dict(options),
            "limits": asdict(limits),
        }
        self._zygote: _Zygote | None = None
        self._former: list[_Zygote] = []  # that were killed; episodes that they started may go on
        self._number = 0

    def new_episode(self) -> ProcessEpisode | None:
        """Start the processes of an episode; None if the zygote is too busy to be told.

        Start the zygote first if there is none. Raise TaskError if it cannot import the environment.
        """
        if self._zygote is not None and not self._zygote.is_usable():
            self._former.append(self._zygote)
            self._zygote = None
        if self._zygote is None:
            self._zygote = _Zygote(self._setup)
        try:
            own, other = socket.socketpair()
        except OSError as error:
            raise TaskError(
                f"{self._setup['key']}: no file descriptor is left for an episode ({error.strerror}); raise "
                "the limit on open files (ulimit -n), or have fewer episodes in flight"
            ) from error
        self._number += 1
        with other:
            if not self._zygote.send(self._number, other.fileno()):
                own.close()
                return None
        return ProcessEpisode(self, self._number, own)

    def kill(self, number: int) -> None:
        """Have the supervisor of an episode killed."""
        if self._zygote is not None:
            self._zygote.send(number)

    def forget(self) -> None:
        """After a fork, drop the zygote without ending it: it belongs to the parent process."""
        for zygote in self._take_zygotes():
            zygote.close.detach()

    def close(self) -> None:
        """End the zygote and all that it started."""
        for zygote in self._take_zygotes():
            zygote.close()

    def _take_zygotes(self) -> list[_Zygote]:
        zygotes = [*self._former, *([] if self._zygote is None else [self._zygote])]
        self._former, self._zygote = [], None
        return zygotes


class _Zygote:
    """The process, from its start on."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mark = secrets.token_hex(16)
        environment = python_environment(
            PYTHONHASHSEED="0", PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
        )
        environment[MARK] = mark
        folder = tempfile.mkdtemp(prefix="hacrl-episodes-")
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        try:
            with other:
                self._process = subprocess.Popen(
                    python_command("hacrl.environments.zygote", str(other.fileno())),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                    start_new_session=True,
                    pass_fds=(other.fileno(),),
                )
        except OSError as error:
            raise TaskError(
                f"{setup['key']}: a process for environments cannot start: {error}; check memory and process "
                "limits"
            ) from error
        self._control = own
        self._full_since: float | None = None  # when the socket's buffer was first found full
        self.close = weakref.finalize(self, _end, self._process, own, mark, folder, os.getpid())
        with errors:
            own.send(json.dumps({**setup, "path": sys.path, "folder": folder}).encode("ascii"))
            try:
                self._wait_until_ready(setup, errors)
            except BaseException:
                self.close()
                raise
        own.setblocking(False)

    def is_usable(self) -> bool:
        """Return whether the process runs. Kill one that was stopped, or that has not read for too long."""
        is_stuck = self._full_since is not None and time.monotonic() - self._full_since > GRACE_SECONDS
        if is_stuck or is_stopped(self._process.pid):
            self._process.kill()
            self._process.wait()
        return self._process.poll() is None

    def send(self, number: int, fd: int | None = None) -> bool:
        """Send a number, and a file descriptor; return False if the socket's buffer is full."""
        try:
            self._send(number, fd)
        except BlockingIOError:
            self._full_since = self._full_since or time.monotonic()
            return False
        except OSError:  # the process has just ended: the episode's socket ends, too
            pass
        self._full_since = None
        return True

    def _send(self, number: int, fd: int | None) -> None:
        packet = number.to_bytes(NUMBER_BYTES, "big")
        socket.send_fds(self._control, [packet], [] if fd is None else [fd])

    def _wait_until_ready(self, setup: Mapping[str, Any], errors: Any) -> None:
        reference, key = setup["reference"], setup["key"]
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if not poll.poll(START_LIMIT * 1000):
            raise TaskError(f"{key}: importing {reference!r} took more than {START_LIMIT:g} s")
        with suppress(OSError):
            if packet := self._control.recv(LONGEST_PACKET):
                reply = json.loads(packet)
                if "error" in reply:
                    raise TaskError(reply["error"])
                return
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        why = lines[-1][:300] if lines else f"exit code {self._process.wait(END_SECONDS)}"
        raise TaskError(f"{key}: the process that imported {reference!r} ended: {why}")


def _end(
    process: subprocess.Popen[bytes], control: socket.socket, mark: str, folder: str, owner: int
) -> None:
    """End a zygote and all that it started. After a fork, only the process that started it may do so."""
    if os.getpid() != owner:
        return
    with suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    deadline = time.monotonic() + END_SECONDS
    while kill_marked(MARK, mark) and time.monotonic() < deadline:  # nothing, unless the zygote was killed
        time.sleep(0.001)
    remove_folder(folder)
