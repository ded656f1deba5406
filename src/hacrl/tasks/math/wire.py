"""Messages between the pool and its workers: JSON behind a four-byte length. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
from typing import Any

_LENGTH_BYTES = 4
LONGEST = 1_000_000  # bytes; two answers of 2,000 characters are far from it


def send(fd: int, message: dict[str, Any]) -> None:
    """Write one message. Raises BrokenPipeError if nobody reads any more."""
    body = json.dumps(message).encode("ascii")  # escapes everything else, lone surrogates too
    data = len(body).to_bytes(_LENGTH_BYTES, "big") + body
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int, longest: int = LONGEST) -> dict[str, Any] | None:
    """Read one message; None at the end of the stream, or where there is something else than a message."""
    header = _read_exactly(fd, _LENGTH_BYTES)
    length = 0 if header is None else int.from_bytes(header, "big")
    body = _read_exactly(fd, length) if 0 < length <= longest else None
    if body is None:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read_exactly(fd: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        chunk = os.read(fd, count - len(data))
        if not chunk:
            return None
        data += chunk
    return data
