"""Read files that may be damaged or hostile, and write files so that a crash never leaves half of one.

Reading does not hang, does not fill the memory, does not leave the given folder, and runs nothing. Every
problem is raised as one error that names the file and the fix.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast

from hacrl.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MEBIBYTE = 2**20
DOCUMENT_LIMIT = 64 * MEBIBYTE  # for a document that is read as a whole
LINE_LIMIT = 16 * MEBIBYTE  # for one line of JSONL; the file may have any size
_ENTRY_LIMIT = 100_000  # for a folder that is searched
_HASH_CHUNK = 4 * MEBIBYTE

_OPEN_FLAGS = {
    "rb": os.O_RDONLY,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "wb": os.O_WRONLY | os.O_CREAT,
}
_FILE_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
Record = TypeVar("Record")


class UnreadableFileError(ConfigError):
    """A file is damaged, not a regular file, too large, or outside its folder."""


class MissingFileError(UnreadableFileError):
    """A file does not exist."""


@dataclass(frozen=True)
class JsonLine:
    """One complete line of a JSONL file."""

    number: int  # counted from 1
    end: int  # offset of the byte after the line
    record: dict[str, Any]


@dataclass(frozen=True)
class JsonLines:
    """All complete lines of a JSONL file."""

    path: Path
    lines: tuple[JsonLine, ...]
    is_truncated: bool  # the file ends with an incomplete line, e.g. of a killed process; it is left out

    @property
    def note(self) -> str | None:
        """A sentence for the user if the last line was left out; otherwise None."""
        if not self.is_truncated:
            return None
        return f"{self.path}: the last line (line {len(self.lines) + 1}) is incomplete and is ignored"


def open_inside(path: Path, folder: Path, mode: Literal["rb", "ab", "wb"] = "rb") -> BinaryIO:
    """Open a regular file inside ``folder``; refuse pipes, devices and links that lead out of the folder.

    ``folder`` itself may be reached by a link.
    """
    return _open_regular(_resolve_inside(path, folder), mode, shown=path)


def check_inside(path: Path, folder: Path) -> None:
    """Refuse a path that leads out of ``folder``, whether the path exists or not."""
    _resolve_inside(path, folder)


def check_file(path: Path, folder: Path) -> None:
    """Refuse a path for a new file if it leads out of ``folder`` or if it is not a regular file."""
    real = _resolve_inside(path, folder)
    if os.path.exists(real):
        _check_regular(real.stat(), path)


def check_tree(tree: Path, folder: Path) -> None:
    """Check a folder with all its subfolders before a library reads it.

    Refuse anything in it that is not a regular file or folder, or that leads out of ``folder``.
    """
    pending, seen = [tree], 0
    check_inside(tree, folder)
    while pending:
        try:
            entries = sorted(pending.pop().iterdir())
        except OSError as error:
            raise UnreadableFileError(f"{tree} cannot be searched: {_reason(error)}") from error
        for entry in entries:
            seen += 1
            if seen > _ENTRY_LIMIT:
                raise UnreadableFileError(
                    f"{tree} holds more than {_ENTRY_LIMIT:,} files; is it the folder of a run?"
                )
            check_inside(entry, folder)
            if entry.is_dir() and not entry.is_symlink():
                pending.append(entry)
            elif not entry.is_dir():
                open_inside(entry, folder).close()


def read_text(path: Path, folder: Path | None = None, limit: int = DOCUMENT_LIMIT) -> str:
    """Return the content of a text file of at most ``limit`` bytes; without ``folder`` it may be anywhere."""
    with _open_regular(path) if folder is None else open_inside(path, folder) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise UnreadableFileError(f"{path} cannot be read: {_reason(error)}") from error
    if len(content) > limit:
        raise UnreadableFileError(f"{path} is larger than {limit / MEBIBYTE:g} MiB: hacrl did not write it")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{path} is not UTF-8 text (at byte {error.start})") from error


def read_json(path: Path, folder: Path, limit: int = DOCUMENT_LIMIT) -> Any:
    """Return the content of a JSON file of at most ``limit`` bytes."""
    return _parse_json(read_text(path, folder, limit), str(path))


def read_jsonl(path: Path, folder: Path) -> JsonLines:
    """Return all records of a JSONL file; :func:`iterate_jsonl` reads files that do not fit into memory."""
    lines = tuple(iterate_jsonl(path, folder))
    with open_inside(path, folder) as file:
        size = file.seek(0, os.SEEK_END)
    return JsonLines(path, lines, is_truncated=size > (lines[-1].end if lines else 0))


def iterate_jsonl(path: Path, folder: Path) -> Iterator[JsonLine]:
    """Yield the complete lines of a JSONL file one by one.

    A last line without a newline, which a killed process leaves, is left out. Damage before it is an error.
    """
    end = 0
    with open_inside(path, folder) as file:
        number = 0
        while line := file.readline(LINE_LIMIT + 1):
            number, end = number + 1, end + len(line)
            where = f"{path}, line {number},"
            if len(line) > LINE_LIMIT:
                raise UnreadableFileError(
                    f"{where} is longer than {LINE_LIMIT / MEBIBYTE:g} MiB: it is damaged"
                )
            if not line.endswith(b"\n"):
                return
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UnreadableFileError(f"{where} is damaged: it is not UTF-8 text") from error
            record = _parse_json(text, where)
            if not isinstance(record, dict):
                raise UnreadableFileError(
                    f"{where} is damaged: it is not a mapping but {type(record).__name__}"
                )
            yield JsonLine(number, end, record)


def as_record(data: Any, record_type: type[Record], where: str) -> Record:
    """Return JSON data as a dataclass; refuse a missing field or one of another type.

    ``where`` names the data in errors.
    """
    from pydantic import ValidationError

    try:
        # Validated as JSON, because JSON lists are valid tuples.
        record: Record = _adapter(cast(Any, record_type)).validate_json(json.dumps(data), strict=True)
        return record
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "its content"
        problem = first["msg"].replace("Input should be", "must be").replace("an object", "a mapping")
        problem = "missing" if first["type"] == "missing" else f"{problem[:1].lower()}{problem[1:]}"
        raise UnreadableFileError(f"{where} is damaged or of another version: {key}: {problem}") from None


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(value, ensure_ascii=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically: after a crash the file has its old or its new content."""
    temporary = unfinished_name(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        flush_to_disk(temporary)
        temporary.replace(path)
    except BaseException:  # e.g. a full disk
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def unfinished_name(path: Path) -> Path:
    """Return the file that :func:`write_text` fills first; a killed process may leave it."""
    return path.with_name(f".{path.name}.new")


def flush_to_disk(path: Path) -> None:
    """Force a file's content, or a folder's list of entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(unfinished: Path, final: Path) -> None:
    """Force a finished folder to disk and rename it to ``final``; delete an earlier folder of that name."""
    for path in (*unfinished.rglob("*"), unfinished):
        flush_to_disk(path)
    if final.exists():
        replaced = final.with_name(f".{final.name}.old")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        unfinished.rename(final)
    flush_to_disk(final.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal text."""
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            checksum.update(chunk)
    return checksum.hexdigest()


def _open_regular(path: Path, mode: Literal["rb", "ab", "wb"] = "rb", shown: Path | None = None) -> BinaryIO:
    """Open a regular file anywhere, without ever waiting for a pipe. ``shown`` names the file in errors."""
    shown = shown or path
    try:
        if path.exists() or mode == "rb":  # checked before opening: opening a device may have an effect
            _check_regular(path.stat(), shown)
        descriptor = os.open(path, _OPEN_FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            _check_regular(os.fstat(descriptor), shown)  # another process may have replaced the file
            if mode == "wb":
                os.ftruncate(descriptor, 0)
            return os.fdopen(descriptor, mode)
        except BaseException:
            os.close(descriptor)
            raise
    except FileNotFoundError:
        raise MissingFileError(f"{shown} does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if isinstance(error, UnreadableFileError):
            raise
        raise UnreadableFileError(f"{shown} cannot be opened: {_reason(error)}") from error


def _reason(error: OSError | ValueError) -> str:
    """Return the system's message without the path, which our message already names."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _resolve_inside(path: Path, folder: Path) -> Path:
    """Return the path with all links resolved, which must be inside the folder."""
    try:
        real, real_folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    except (OSError, ValueError) as error:
        raise UnreadableFileError(f"{path!s} cannot be resolved: {_reason(error)}") from error
    if real != real_folder and real_folder not in real.parents:
        raise UnreadableFileError(
            f"{path} leads out of {folder}, to {real}; hacrl does not follow a link out of a run's folder: "
            "replace the link by a copy"
        )
    return real


def _check_regular(status: os.stat_result, shown: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _FILE_TYPES.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnreadableFileError(f"{shown} is {kind}, not a file")


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UnreadableFileError(f"{where} is damaged: it is not valid JSON ({error})") from error


@cache
def _adapter(record_type: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(record_type)
