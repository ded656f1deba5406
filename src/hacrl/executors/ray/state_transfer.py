"""Agents' tensors on their way into and out of checkpoints, in pieces: nobody holds a second copy of all.

A process that shares a disk with the run's process writes its files itself. All others send them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hacrl.errors import CheckpointError
from hacrl.training.tensor_files import (
    PIECE,
    TensorFile,
    TensorStream,
    WrittenFile,
    tensor_bytes,
    tensor_file,
    write_tensors,
)

TOKEN = ".shared"  # a file that shows whether another process sees the same folder
PIECES_UNDER_WAY = 4  # to one process


def share(folder: Path) -> str:
    """Write a token into a folder, and return it."""
    token = secrets.token_hex(16)
    (folder / TOKEN).write_text(token)
    return token


def is_shared(folder: Path, token: str) -> bool:
    """Return whether this process sees the folder in which the token was written."""
    try:
        return (folder / TOKEN).read_text() == token
    except (OSError, ValueError):
        return False


def write_shared(folder: Path, agent: str, stream: TensorStream) -> WrittenFile:
    """Write an agent's file into a folder that the run's process sees, too."""
    try:
        return write_tensors(folder / tensor_file(agent), stream)
    except OSError as error:
        raise CheckpointError(f"agent {agent!r} cannot write into {folder}: {error}") from error


class ArrivingFiles:
    """The agents' files of a checkpoint: some are written elsewhere, others arrive here in pieces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TensorFile] = {}
        self._written: dict[str, WrittenFile] = {}

    def add(self, agent: str, value: WrittenFile | np.ndarray[Any, Any]) -> None:
        """Take a finished file or the next piece of one."""
        name = tensor_file(agent)
        if isinstance(value, WrittenFile):
            self._written[name] = value
            return
        if name not in self._open:
            self._open[name] = TensorFile(self._folder / name)
        self._open[name].add(value.data)

    def files(self) -> dict[str, WrittenFile]:
        """Return all files by name."""
        return self._written | {name: file.written for name, file in self._open.items()}

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of tensors by name."""
    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def pieces_of(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, int, np.ndarray[Any, Any]]]:
    """Yield name, first byte and content of pieces of all tensors."""
    for name, tensor in tensors.items():
        data = tensor_bytes(tensor)
        for start in range(0, len(data), PIECE):
            yield name, start, np.frombuffer(data[start : start + PIECE], np.uint8)


def send(calls: Iterator[Callable[[], Any]], wait: Callable[[Any], None]) -> None:
    """Make calls of another process, of which few are under way at a time. ``wait``: until one has ended."""
    under_way: list[Any] = []
    for call in calls:
        under_way.append(call())
        if len(under_way) > PIECES_UNDER_WAY:
            wait(under_way.pop(0))
    for one in under_way:
        wait(one)


class ArrivingTensors:
    """Tensors in this process's memory that other threads fill piece by piece, in any order."""

    def __init__(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        self.tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in shapes.items()
        }

    def take(self, name: str, start: int, piece: np.ndarray[Any, Any]) -> None:
        """Fill a tensor with a piece from byte ``start`` on."""
        flat = self.tensors[name].flatten().view(torch.uint8).numpy()
        flat[start : start + len(piece)] = piece
