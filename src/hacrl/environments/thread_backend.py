"""Episodes in threads of this process, for factories that no other process can import.

A thread cannot be killed. One that is out of time is left to itself: its episode fails, and the thread runs
on in the background until the environment returns.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hacrl.environments.interface import EnvironmentLimits
from hacrl.environments.player import Player
from hacrl.environments.replies import Reply


class ThreadEpisode:
    """An episode in a thread."""

    grace = 0.0
    wants_to_write = False

    def __init__(self, player: Player) -> None:
        self._calls: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._own, self._other = socket.socketpair()  # a byte says that a reply has arrived
        threading.Thread(target=self._serve, args=(player,), daemon=True, name="hacrl-episode").start()

    def fileno(self) -> int:
        """Return the file descriptor that becomes readable when a reply arrives."""
        return self._own.fileno()

    def send(self, message: Mapping[str, Any], limit: float) -> None:
        """Send a call without waiting; the pool keeps the limit."""
        self._calls.put(message)

    def receive(self) -> Reply | None:
        """Return the reply if it has arrived."""
        poll = select.poll()
        poll.register(self._own, select.POLLIN)
        if not poll.poll(0):
            return None
        self._own.recv(1)
        return self._replies.get()

    def end(self) -> None:
        """End the thread once the environment has returned."""
        self._calls.put(None)
        self._own.close()

    kill_supervisor = end

    def _serve(self, player: Player) -> None:
        while (message := self._calls.get()) is not None:
            began = time.monotonic()
            content = player.answer(message)
            self._replies.put(Reply(content, seconds=time.monotonic() - began))
            with suppress(OSError):  # the episode has been ended meanwhile
                self._other.send(b"r")
        self._other.close()
        player.close()


class ThreadBackend:
    """Starts episodes of one environment in threads."""

    def __init__(
        self, factory: Callable[..., Any], options: Mapping[str, Any], limits: EnvironmentLimits
    ) -> None:
        self._factory, self._options, self._limits = factory, options, limits

    def new_episode(self) -> ThreadEpisode:
        """Start the thread of an episode."""
        longest = self._limits.observation_characters
        return ThreadEpisode(Player(self._factory, self._options, longest, seeds_global_generators=False))

    def close(self) -> None:
        """Do nothing: threads end with their episodes."""

    def forget(self) -> None:
        """Do nothing: after a fork there are no threads."""
