"""Messages over a TCP connection: JSON objects, each after its length; long lists of numbers as base64."""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.numbers_as_text import (
    floats_from_text,
    floats_to_text,
    integers_from_text,
    integers_to_text,
)
from hacrl.types import Sampling

Message = dict[str, Any]
SEND_SECONDS = 60.0  # until the other end must have taken a message from the network
LENGTH = struct.Struct(">Q")
LONGEST_MESSAGE = 2**32  # bytes
LONGEST_GREETING = 2**12


class Connection:
    """One end of a connection. Several threads may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_SECONDS), 0))
        end.settimeout(None)

    @property
    def address(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def send(self, message: Message) -> None:
        """Send a message. Raise OSError if the connection has ended or nobody reads from it."""
        data = json.dumps(message).encode()
        with self._sending:
            self._socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self, longest: int = LONGEST_MESSAGE) -> Message | None:
        """Wait for the next message; return None if the connection has ended, or for what is no message."""
        header = self._read(LENGTH.size)
        length = 0 if header is None else LENGTH.unpack(header)[0]
        data = self._read(length) if 0 < length <= longest else None
        if data is None:
            return None
        try:
            message = json.loads(data)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                received = self._socket.recv(min(count - len(data), 2**20))
            except OSError:  # also if another thread has closed the connection
                return None
            if not received:
                return None
            data += received
        return bytes(data)

    def limit_waiting(self, seconds: float | None) -> None:
        """Let :meth:`receive` wait for at most so many seconds; None: for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """End the connection; a thread that waits in :meth:`receive` returns."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(host: str, port: int, token: str, replica: int, timeout: float) -> Connection:
    """Connect to the engine that listens there, as a replica that knows its token."""
    connection = Connection(socket.create_connection((host, port), timeout))
    connection.send({"token": token, "replica": replica})
    return connection


def greeted(end: socket.socket, token: str, timeout: float) -> tuple[int, Connection] | None:
    """Return the number of the replica that has connected; None, and hang up, if it is none of ours."""
    connection = Connection(end)
    connection.limit_waiting(timeout)
    greeting = connection.receive(LONGEST_GREETING)
    connection.limit_waiting(None)
    if greeting is None or not hmac.compare_digest(str(greeting.get("token")), token):
        connection.close()
        return None
    return int(greeting["replica"]), connection


def request_message(request: GenerationRequest) -> Message:
    """Return a generation request as plain JSON values."""
    sampling = request.sampling
    return {
        "prompts": [integers_to_text(prompt) for prompt in request.prompts],
        "samples_per_prompt": request.samples_per_prompt,
        "sampling": asdict(sampling),
        "stop_ids": sorted(request.stop_ids),
        "seed": request.seed,
        "response_seeds": request.response_seeds,
        "limits": request.limits,
    }


def request_of(message: Message) -> GenerationRequest:
    """Return what :func:`request_message` was given."""
    seeds, limits = message["response_seeds"], message["limits"]
    return GenerationRequest(
        [integers_from_text(prompt) for prompt in message["prompts"]],
        message["samples_per_prompt"],
        Sampling(**{**message["sampling"], "stop": tuple(message["sampling"]["stop"])}),
        frozenset(message["stop_ids"]),
        message["seed"],
        response_seeds=None if seeds is None else tuple(seeds),
        limits=None if limits is None else tuple(limits),
    )


def sample_message(sample: Sample) -> list[Any]:
    """Return a sample as plain JSON values."""
    return [integers_to_text(sample.token_ids), floats_to_text(sample.logprobs), sample.versions]


def sample_of(message: list[Any]) -> Sample:
    """Return what :func:`sample_message` was given."""
    ids, logprobs, versions = message
    return Sample(
        integers_from_text(ids),
        floats_from_text(logprobs),
        tuple((version, tokens) for version, tokens in versions),
    )
