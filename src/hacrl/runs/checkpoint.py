"""Checkpoints on disk: JSON documents, tensors as safetensors files, and a manifest with all checksums."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.errors import CheckpointError
from hacrl.files import UnreadableFileError, open_inside, publish_folder, read_json, sha256_of, write_json
from hacrl.training.tensor_files import WrittenFile, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CheckpointContent:
    """JSON documents and groups of tensors by name, in memory. A name becomes a file name."""

    documents: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(t.numel() * t.element_size() for group in self.tensors.values() for t in group.values())


SCHEMA = 1  # version of the format; raised when older code cannot read the content
MANIFEST = "manifest.json"  # written last: size and checksum of every other file
_FOLDER_NAME = re.compile(r"step-(\d{6,})(?:-(\d{2,}))?")
_DISK_MARGIN = 1.02  # headers and documents need a little space besides the tensors


@dataclass(frozen=True, order=True)
class CheckpointId:
    """Number of finished steps and of finished phases of the next step; later ids compare greater."""

    steps: int
    phases: int = 0

    @property
    def folder(self) -> str:
        """The checkpoint's folder name."""
        return f"step-{self.steps:06d}" + (f"-{self.phases:02d}" if self.phases else "")

    @classmethod
    def parse(cls, name: str) -> CheckpointId | None:
        """Return the id that a folder name stands for; None if it is not a checkpoint."""
        found = _FOLDER_NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2] or 0))


# Writes safetensors files into a folder; returns file name -> size and checksum.
WriteFiles = Callable[[Path], Mapping[str, WrittenFile]]


class CheckpointStore:
    """The checkpoints of one run: writes, finds, verifies and deletes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ids(self) -> list[CheckpointId]:
        """Return all finished checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (CheckpointId.parse(path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(which for which in found if which is not None)

    def path(self, which: CheckpointId) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / which.folder

    def write(
        self,
        which: CheckpointId,
        content: CheckpointContent,
        score: float | None = None,
        write_more: WriteFiles | None = None,
    ) -> None:
        """Write into a temporary folder, then rename it. A failure leaves earlier checkpoints untouched.

        ``write_more`` writes groups of tensors that are not in the content.
        """
        unfinished = self.folder / f".{which.folder}.unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            self._check_disk_space(content)
            files = _write_files(unfinished, content)
            if write_more is not None:
                files |= {name: asdict(written) for name, written in write_more(unfinished).items()}
            write_json(unfinished / MANIFEST, {"schema": SCHEMA, "score": score, "files": files})
            publish_folder(unfinished, self.path(which))
        except (OSError, CheckpointError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise self._write_error(error, content) from error

    def _check_disk_space(self, content: CheckpointContent) -> None:
        free, needed = shutil.disk_usage(self.folder).free, int(content.bytes * _DISK_MARGIN)
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free:,} bytes free, {needed:,} needed")

    def _write_error(self, error: Exception, content: CheckpointContent) -> CheckpointError:
        ids = self.ids()
        last = f"the last checkpoint is {self.path(ids[-1])}" if ids else "there is no checkpoint yet"
        reason = str(error)
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or "No space left" in reason or "os error 28" in reason:
            size = f" of {content.bytes / 2**30:.2f} GiB" if content.tensors else ""
            return CheckpointError(
                f"disk full: a checkpoint{size} does not fit into {self.folder} "
                f"({reason}); {last}. Free some space, then continue with `hacrl resume`; "
                "checkpoint.keep_last says how many checkpoints are kept"
            )
        return CheckpointError(f"a checkpoint cannot be written to {self.folder}: {reason}; {last}")

    def read(self, which: CheckpointId) -> CheckpointContent:
        """Return a checkpoint after verifying every byte; raise :class:`CheckpointError` if it changed."""
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
        """Return a checkpoint's manifest; raise :class:`CheckpointError` if it is damaged."""
        path = self.path(which) / MANIFEST
        try:
            manifest = read_json(path, self.path(which))
            schema, files = manifest["schema"], manifest["files"]
            is_valid = isinstance(files, dict) and all(_is_entry(key, value) for key, value in files.items())
        except UnreadableFileError as error:
            raise CheckpointError(str(error)) from error
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error!r}") from error
        if schema != SCHEMA:
            raise CheckpointError(
                f"{path} has schema {schema!r}, this hacrl reads {SCHEMA}: use the version that wrote it"
            )
        if not is_valid:
            raise CheckpointError(f"{path} is damaged: its list of files is invalid")
        found: dict[str, Any] = manifest
        return found

    def newest_intact(self) -> tuple[CheckpointId, CheckpointContent, list[str]] | None:
        """Return the newest undamaged checkpoint with its id, and the problems of newer ones."""
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
        """Delete all checkpoints but the newest and the best.

        A checkpoint in the middle of a step is kept until that step is finished.
        """
        ids = self.ids()
        whole = [which for which in ids if not which.phases]
        kept = set(whole[-keep_last:])
        kept |= {which for which in ids if which.phases and (not whole or which > whole[-1])}
        scored = [(score, which) for which in whole if (score := self._score(which)) is not None]
        kept |= {which for _, which in sorted(scored, reverse=True)[:keep_best]}
        for which in ids:
            if which not in kept:
                shutil.rmtree(self.path(which), ignore_errors=True)

    def _score(self, which: CheckpointId) -> float | None:
        try:
            score = self.manifest(which).get("score")
        except CheckpointError:
            return None
        return float(score) if isinstance(score, int | float) else None


def _write_files(folder: Path, content: CheckpointContent) -> dict[str, dict[str, Any]]:
    """Write all documents and tensors; return file name -> size and checksum."""
    files = {}
    for name, document in content.documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    for name, tensors in content.tensors.items():
        path = folder / f"{name}.safetensors"
        files[path.name] = asdict(write_tensors(path, tensors))
    return files


def _is_entry(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]+\.(json|safetensors)", name) is not None
    return is_name and isinstance(value, dict) and {"bytes", "sha256"} <= value.keys()


def _check_file(file: Path, folder: Path, expected: dict[str, Any]) -> None:
    try:
        with open_inside(file, folder) as opened:
            size = opened.seek(0, os.SEEK_END)
    except UnreadableFileError as error:
        raise CheckpointError(str(error)) from error
    if size != expected["bytes"]:
        raise CheckpointError(f"{file} is damaged: {size} bytes instead of {expected['bytes']}")
    if sha256_of(file) != expected["sha256"]:
        raise CheckpointError(f"{file} is damaged: its checksum differs from the manifest's")
