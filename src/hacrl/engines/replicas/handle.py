"""A replica as the engine sees it: its process, messages to it, and a thread that takes its replies."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from contextlib import suppress
from typing import Any

import torch

from hacrl.engines.replicas.connection import Connection, Message
from hacrl.engines.replicas.placement import ReplicaProcess
from hacrl.engines.sync_check import EngineError

EXIT_SECONDS = 2.0  # from the end of a connection until its process has ended


class ReplicaLostError(EngineError):
    """A replica died or is silent; the others can go on."""

    def __init__(self, replica: ReplicaHandle, why: str) -> None:
        super().__init__(f"{replica.name} is lost: {why}")
        self.replica = replica


class ReplicaHandle:
    """One replica. ``events`` gets what belongs to jobs, and None as the message if the replica is lost."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        process: ReplicaProcess,
        events: queue.SimpleQueue[tuple[ReplicaHandle, Message | None]],
    ) -> None:
        self.name = name
        self.device = device
        self.process = process
        self.has_weights = False  # all of them, of whichever version
        self.last_progress = time.monotonic()
        self.steps = -1  # of its generations, as it reported last
        self._events = events
        self._connection: Connection | None = None
        self._numbers = itertools.count(1)
        self._replies: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._changing = threading.Lock()  # of the replies that are awaited
        self._is_gone = False  # the connection has ended

    @property
    def is_connected(self) -> bool:
        """Whether the replica has connected and the connection has not ended."""
        return self._connection is not None and not self._is_gone

    def connect(self, connection: Connection) -> None:
        """Take the replica's connection."""
        self._connection = connection
        threading.Thread(target=self._receive, name=f"hacrl-{self.name}", daemon=True).start()

    def post(self, message: Message) -> None:
        """Send a message that has no reply; a replica that is gone is noticed by the thread that receives."""
        with suppress(OSError):
            if self._connection is not None:
                self._connection.send(message)

    def ask(self, message: Message) -> Reply:
        """Send a message; return where its reply will arrive."""
        number = next(self._numbers)
        replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        with self._changing:
            if self._is_gone:
                replies.put(None)
            self._replies[number] = replies
        self.post({**message, "number": number})
        return Reply(self, message["do"], replies)

    def _receive(self) -> None:
        """Pass on all messages until the connection ends."""
        connection = self._connection
        while (message := None if connection is None else connection.receive()) is not None:
            if "job" in message:
                self.last_progress = time.monotonic()
                self._events.put((self, message))
            else:
                with self._changing:
                    replies = self._replies.pop(message["reply"] or 0, None)
                if replies is not None:
                    replies.put(message)
        if connection is not None:
            connection.close()
        with self._changing:
            self._is_gone = True
            for replies in self._replies.values():
                replies.put(None)
        self._events.put((self, None))

    def why_lost(self) -> str:
        """Return why the replica is gone, for messages."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self.process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        return "its connection broke off" if self.process.is_alive() else self.process.why_ended()

    def end(self, patience: float = 0.0) -> None:
        """End the process and the connection."""
        if patience:
            self.post({"do": "end"})
        self.process.end(patience)
        if self._connection is not None:
            self._connection.close()
        self._is_gone = True


class Reply:
    """The reply to a message, which may not have arrived yet."""

    def __init__(self, replica: ReplicaHandle, what: str, replies: queue.SimpleQueue[Message | None]) -> None:
        self._replica = replica
        self._what = what
        self._replies = replies

    @property
    def has_arrived(self) -> bool:
        """Whether :meth:`result` would not wait."""
        return not self._replies.empty()

    def result(self, timeout: float) -> Any:
        """Wait for the reply; raise ReplicaLostError if there is none, EngineError if the replica failed."""
        try:
            message = self._replies.get(timeout=timeout)
        except queue.Empty:
            raise ReplicaLostError(
                self._replica, f"it did not answer {self._what!r} within {timeout:g} s"
            ) from None
        if message is None:
            raise ReplicaLostError(self._replica, self._replica.why_lost())
        if "error" in message:
            raise EngineError(f"{self._replica.name} failed at {self._what!r}: {message['error']}")
        return message["result"]
