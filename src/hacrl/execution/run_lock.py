"""One process at a time writes a run's folder."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from hacrl.errors import ConfigError

LOCK = ".lock"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RunLock:
    """A lock that goes with the process that holds it, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._release: weakref.finalize[..., RunLock] | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._release is not None and self._release.alive

    def take(self) -> None:
        """Raises if another process, or another run in this one, writes here."""
        if self.is_held:
            return
        try:
            handle = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            raise ConfigError(f"output: {self._path} cannot be used as a lock: {error.strerror}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise ConfigError(
                f"output: {self._path.parent} is being written by process {owner}; wait for it"
            ) from error
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._release = weakref.finalize(self, os.close, handle)

    def give_up(self) -> None:
        """Let others write. May be called more than once."""
        if self._release is not None:
            self._release()
