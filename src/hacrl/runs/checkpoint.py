"""What a checkpoint holds, in memory.

Tensors written to a safetensors file one after the other.

The library's own writer wants all of a file's tensors in the machine's memory at once: for a GPU's that is a
second copy of an agent's optimizer, just when memory is short. Here one tensor at a time is copied, and the
checksum is that of what should be in the file, taken on the way. Files are read by the library.

The folder of checkpoints of one run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.errors import CheckpointError
from hacrl.files import UnreadableFileError, digest, open_inside, publish_folder, read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CheckpointContent:
    """JSON documents and groups of tensors, both by name; a name becomes a file's."""

    documents: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(t.numel() * t.element_size() for group in self.tensors.values() for t in group.values())


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


SCHEMA = 1  # raised when the content changes so that older code could not read it
MANIFEST = "manifest.json"  # written last: every other file with its size and checksum
_NAME = re.compile(r"step-(\d{6,})(?:-(\d{2,}))?")
_SPARE = 1.02  # a little more than the tensors: headers, documents


@dataclass(frozen=True, order=True)
class CheckpointId:
    """After how many steps, and how many phases of the next one; later ones compare greater."""

    steps: int
    phases: int = 0

    @property
    def folder(self) -> str:
        """The checkpoint's folder name."""
        return f"step-{self.steps:06d}" + (f"-{self.phases:02d}" if self.phases else "")

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """The id a folder's name stands for; None if it is no checkpoint."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2] or 0))


class CheckpointStore:
    """Writes, finds, checks and removes checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ids(self) -> list[CheckpointId]:
        """All checkpoints, oldest first; unfinished ones have another name and are not among them."""
        if not self.folder.is_dir():
            return []
        found = (CheckpointId.parse(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(one for one in found if one is not None)

    def path(self, which: CheckpointId) -> Path:
        """Where a checkpoint is."""
        return self.folder / which.folder

    def write(self, which: CheckpointId, content: CheckpointContent, score: float | None = None) -> None:
        """Write beside, then rename. If that fails, what was there before is untouched."""
        unfinished = self.folder / f".{which.folder}.unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self._check_room(content)
            files = _write_files(unfinished, content)
            write_json(unfinished / MANIFEST, {"schema": SCHEMA, "score": score, "files": files})
            publish_folder(unfinished, self.path(which))
        except (OSError, CheckpointError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise self._explained(error, content) from error

    def _check_room(self, content: CheckpointContent) -> None:
        free, needed = shutil.disk_usage(self.folder).free, int(content.bytes * _SPARE)
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free:,} bytes free, {needed:,} needed")

    def _explained(self, error: Exception, content: CheckpointContent) -> CheckpointError:
        last = self.ids()
        kept = f"the last good one is {self.path(last[-1])}" if last else "there is none yet"
        why = str(error)
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in why or "os error 28" in why:
            return CheckpointError(
                f"disk full: a checkpoint of {content.bytes / 2**30:.2f} GiB does not fit into {self.folder} "
                f"({why}); {kept}. Make room, then go on with `hacrl resume`; fewer are kept with "
                "checkpoint.keep_last"
            )
        return CheckpointError(f"a checkpoint cannot be written to {self.folder}: {why}; {kept}")

    def read(self, which: CheckpointId) -> CheckpointContent:
        """A checkpoint, every byte checked; raises :class:`CheckpointError` if any is not as written."""
        from safetensors.torch import load_file

        path = self.path(which)
        manifest = self.manifest(which)
        documents: dict[str, Any] = {}
        tensors: dict[str, Any] = {}
        for name, expected in manifest["files"].items():
            file = path / name
            _check_file(file, path, expected)
            if name.endswith(".json"):
                documents[name.removesuffix(".json")] = json.loads(file.read_text("utf-8"))
            else:
                tensors[name.removesuffix(".safetensors")] = load_file(file)
        return CheckpointContent(documents, tensors)

    def manifest(self, which: CheckpointId) -> dict[str, Any]:
        """What a checkpoint says it holds."""
        path = self.path(which) / MANIFEST
        try:
            manifest = read_json(path, self.path(which))
            schema, files = manifest["schema"], manifest["files"]
            sound = isinstance(files, dict) and all(_is_entry(key, value) for key, value in files.items())
        except UnreadableFileError as error:
            raise CheckpointError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if schema != SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema!r}, this hacrl reads {SCHEMA}: use the version that wrote it"
            )
        if not sound:
            raise CheckpointError(f"{path} is damaged: its list of files is not one")
        found: dict[str, Any] = manifest
        return found

    def newest_good(self) -> tuple[CheckpointId, CheckpointContent, list[str]] | None:
        """The newest checkpoint that is as it was written, and what is wrong with newer ones."""
        problems: list[str] = []
        for which in reversed(self.ids()):
            try:
                return which, self.read(which), problems
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(f"no checkpoint in {self.folder} can be used: " + "; ".join(problems))
        return None

    def prune(self, keep_last: int, keep_best: int) -> None:
        """Remove all but the newest and the best; parts of a step that has been finished since go first."""
        ids = self.ids()
        whole = [one for one in ids if not one.phases]
        kept = set(whole[-keep_last:])
        kept |= {one for one in ids if one.phases and (not whole or one > whole[-1])}
        scored = [(score, one) for one in whole if (score := self._score(one)) is not None]
        kept |= {one for _, one in sorted(scored, reverse=True)[:keep_best]}
        for one in ids:
            if one not in kept:
                shutil.rmtree(self.path(one), ignore_errors=True)

    def _score(self, which: CheckpointId) -> float | None:
        try:
            score = self.manifest(which).get("score")
        except CheckpointError:
            return None
        return float(score) if isinstance(score, int | float) else None


def _write_files(folder: Path, content: CheckpointContent) -> dict[str, dict[str, Any]]:
    """Name -> size and checksum."""
    files = {}
    for name, document in content.documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
    for name, tensors in content.tensors.items():
        path = folder / f"{name}.safetensors"
        files[path.name] = asdict(write_tensors(path, tensors))
    return files


def _is_entry(name: object, value: object) -> bool:
    plain = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]+\.(json|safetensors)", name) is not None
    return plain and isinstance(value, dict) and {"bytes", "sha256"} <= value.keys()


def _check_file(file: Path, folder: Path, expected: dict[str, Any]) -> None:
    try:
        with open_inside(file, folder) as opened:
            size = opened.seek(0, os.SEEK_END)
    except UnreadableFileError as error:
        raise CheckpointError(str(error)) from error
    if size != expected["bytes"]:
        raise CheckpointError(f"{file} is damaged: {size} bytes instead of {expected['bytes']}")
    if digest(file) != expected["sha256"]:
        raise CheckpointError(f"{file} is damaged: its checksum is not what was written")
