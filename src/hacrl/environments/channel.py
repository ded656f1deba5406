"""Messages over a socket that never block: what cannot be written or read at once stays in a buffer."""

from __future__ import annotations

import socket
from contextlib import suppress

LENGTH_BYTES = 4
_CHUNK = 2**18


class MessageTooLongError(Exception):
    """The other side announced a message that is longer than allowed."""


class Channel:
    """A stream socket that carries messages: a length in four bytes, then as many bytes."""

    def __init__(self, connection: socket.socket, longest: int) -> None:
        """Take over a socket. ``longest``: bytes of a message that may be received."""
        connection.setblocking(False)
        self._socket, self._longest = connection, longest
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self.is_at_end = False  # whether the other side has closed the socket

    def fileno(self) -> int:
        """Return the socket's file descriptor, for poll."""
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        """Whether :meth:`flush` has something left to write."""
        return bool(self._outgoing)

    def send(self, body: bytes) -> None:
        """Write a message, or as much of it as possible; :meth:`flush` writes the rest."""
        self._outgoing += len(body).to_bytes(LENGTH_BYTES, "big") + body
        self.flush()

    def flush(self) -> None:
        """Write what is left, without waiting."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:  # the other side is gone, which is noticed when reading
            self._outgoing.clear()

    def receive(self) -> bytes | None:
        """Return the next message, None if none is complete. Raise MessageTooLongError."""
        if (body := self._next()) is not None:
            return body
        while not self.is_at_end:
            try:
                chunk = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return None
            except OSError:  # reset by the other side
                chunk = b""
            if not chunk:
                self.is_at_end = True
            self._incoming += chunk
            if (body := self._next()) is not None:
                return body
        return None

    def _next(self) -> bytes | None:
        if len(self._incoming) < LENGTH_BYTES:
            return None
        length = int.from_bytes(self._incoming[:LENGTH_BYTES], "big")
        if length > self._longest:
            raise MessageTooLongError
        end = LENGTH_BYTES + length
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[LENGTH_BYTES:end])
        del self._incoming[:end]
        return body

    def close(self, shut_down: bool = True) -> None:
        """Close the socket. ``shut_down``: for copies of the socket in other processes as well."""
        if shut_down:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
