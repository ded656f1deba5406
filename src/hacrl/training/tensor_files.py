"""An agent's tensors as a safetensors file, written tensor by tensor, without a second copy of all of them.

The safetensors library would first copy all tensors of a file into host memory, which may not hold a second
copy of an agent's optimizer. The library reads the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# torch's name of a type -> the name in the safetensors format
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 8  # bytes: the tensors begin at a multiple
PIECE = 16 * 2**20  # bytes of a tensor that travel in one message


@dataclass(frozen=True)
class WrittenFile:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorStream:
    """Tensors that come one by one, so that only one of them need be whole in host memory."""

    shapes: Mapping[str, Tensor]  # tensors without values, on the meta device, in the order of the file
    values: Callable[[], Iterator[Tensor]]  # in that order; each is valid until the next one

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TensorStream:
        """Return a stream of tensors that are there already, on any device."""
        order = in_file_order(tensors)
        return cls(
            {name: torch.empty_like(tensors[name], device="meta") for name in order},
            lambda: (tensors[name] for name in order),
        )

    def file(self) -> Iterator[memoryview]:
        """Yield the safetensors file: its header, then pieces of at most ``PIECE`` bytes."""
        yield memoryview(_header(self.shapes))
        for tensor in self.values():
            data = tensor_bytes(tensor)
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]


def tensor_group(agent: str) -> str:
    """Return the name of an agent's file in a checkpoint, without its ending."""
    return f"agent-{agent}"


def tensor_file(agent: str) -> str:
    """Return the name of an agent's file in a checkpoint."""
    return f"{tensor_group(agent)}.safetensors"


def in_file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names, the widest types first, so that every tensor is aligned to its element size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's content in host memory; a copy if the tensor is elsewhere or has gaps."""
    flat = tensor.detach().cpu().contiguous().flatten()
    if not flat.numel():
        return memoryview(b"")
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor] | TensorStream) -> WrittenFile:
    """Write a new safetensors file and return its size and checksum; equal tensors give equal bytes."""
    stream = tensors if isinstance(tensors, TensorStream) else TensorStream.of(tensors)
    with TensorFile(path) as file:
        for piece in stream.file():
            file.add(piece)
    return file.written


class TensorFile:
    """A new file that is written piece by piece.

    The checksum is computed from the data in memory, so that it also finds errors of the disk.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._checksum, self._size = hashlib.sha256(), 0

    def add(self, piece: Any) -> None:
        """Append the bytes of any buffer."""
        self._file.write(piece)
        self._checksum.update(piece)
        self._size += memoryview(piece).nbytes

    @property
    def written(self) -> WrittenFile:
        """Size and checksum of what was written."""
        return WrittenFile(self._size, self._checksum.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _header(shapes: Mapping[str, Tensor]) -> bytes:
    entries, offset = {}, 0
    for name, tensor in shapes.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
