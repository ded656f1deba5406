"""The program that imports an environment once and forks a supervisor with an environment for each episode.

Command: ``python -m hacrl.environments.zygote FD``. The file descriptor is a socket that keeps packets apart:

1. the pool sends the reference of a factory and the limits, as JSON; the reply is ``{"ready": true}``, or
   ``{"error": ...}`` if the import fails;
2. a packet with an episode's number carries the episode's socket; the number alone kills the supervisor.

The process ends with the socket or with the process that started it, and leaves no process behind.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from hacrl.environments.channel import Channel
from hacrl.environments.interface import EnvironmentLimits
from hacrl.environments.process_tree import become_subreaper, kill_descendants
from hacrl.environments.supervisor import EpisodeSetup, start_failure, supervise
from hacrl.errors import TaskError
from hacrl.plugins import load_reference

LONGEST_PACKET = 65536
NUMBER_BYTES = 8
END_SECONDS = 5.0  # for supervisors to end by themselves
POLL_SECONDS = 0.25  # between looks at ended supervisors and at the process that started this one


def main() -> None:
    """Serve until the socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(control.recv(LONGEST_PACKET))
    sys.path[:] = setup["path"]
    become_subreaper()
    try:
        factory = load_reference(setup["reference"], setup["key"], TaskError)
        if not callable(factory):
            raise TaskError(f"{setup['key']}: {setup['reference']!r} is not a class or function")
    except TaskError as error:
        control.send(json.dumps({"error": str(error)[: LONGEST_PACKET // 12]}).encode("ascii"))
        return
    if importlib.util.find_spec("numpy") is not None:
        import numpy.random  # noqa: F401 - seeded in every episode, which may import it only then
    gc.collect()
    gc.freeze()  # forks share these objects: a collection would touch and so copy them
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what episodes print is dropped
    control.send(b'{"ready": true}')
    _Zygote(control, factory, setup).serve()


class _Zygote:
    def __init__(self, control: socket.socket, factory: Any, setup: dict[str, Any]) -> None:
        self._control, self._factory, self._setup = control, factory, setup
        self._supervisors: dict[int, int] = {}  # process id -> number of the episode
        self._parent = os.getppid()

    def serve(self) -> None:
        """Fork and reap until the socket or the parent process ends."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        next_look = 0.0
        while os.getppid() == self._parent:
            if poll.poll(POLL_SECONDS * 1000):
                packet, fds, _, _ = socket.recv_fds(self._control, NUMBER_BYTES, 1)
                if not packet:
                    break
                self._obey(int.from_bytes(packet, "big"), fds)
            if time.monotonic() >= next_look:
                self._reap()
                next_look = time.monotonic() + POLL_SECONDS
        self._end()

    def _obey(self, number: int, fds: list[int]) -> None:
        if fds:
            self._fork(number, fds[0])
            return
        for pid, episode in self._supervisors.items():
            if episode == number:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, number: int, fd: int) -> None:
        connection = socket.socket(fileno=fd)
        setup = EpisodeSetup(
            self._factory,
            self._setup["options"],
            EnvironmentLimits(**self._setup["limits"]),
            os.path.join(self._setup["folder"], str(number)),
        )
        try:
            pid = os.fork()
        except OSError as error:
            Channel(connection, 0).send(start_failure(error))
            connection.close()
            return
        if pid == 0:
            try:
                supervise(connection, setup, [self._control.fileno()])
            finally:
                os._exit(1)
        self._supervisors[pid] = number
        connection.close()

    def _reap(self) -> None:
        """Reap ended supervisors, and kill what one left behind that was itself killed."""
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._supervisors.pop(pid, None)
        kill_descendants(0.0, frozenset(self._supervisors))

    def _end(self) -> None:
        """Wait for the supervisors, whose sockets have ended too; then kill whatever is left."""
        deadline = time.monotonic() + END_SECONDS
        while self._supervisors and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)
        kill_descendants(END_SECONDS)


if __name__ == "__main__":
    main()
