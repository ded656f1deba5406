"""Tensors written to a safetensors file one after the other.

The library's own writer wants all of a file's tensors in the machine's memory at once: for a GPU's that is a
second copy of an agent's optimizer, just when memory is short. Here one tensor at a time is copied, and the
checksum is that of what should be in the file, taken on the way. Files are read by the library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# What the format calls torch's types.
TYPES = {
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
_ALIGNED = 8  # bytes: where the numbers begin


@dataclass(frozen=True)
class Written:
    """A file's size and SHA-256."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """A new file; equal tensors give equal bytes."""
    # the widest numbers first, so that all of a kind lie where a processor likes to read them
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    total, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for data in _parts({name: tensors[name] for name in order}):
            file.write(data)
            total.update(data)
            size += len(data)
    return Written(size, total.hexdigest())


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for tensor in tensors.values():
        yield _bytes(tensor)


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries, place = {}, 0
    for name, tensor in tensors.items():
        end = place + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": TYPES[str(tensor.dtype).removeprefix("torch.")],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data
