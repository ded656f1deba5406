"""Files of a folder that may be damaged or hostile: read without hanging, filling memory or leaving it.

Nothing here unpickles or runs anything. Whatever is wrong is one error that names the file and the fix.

Writing that survives a crash: either the old is there, or the new, never half of it.
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
DOCUMENT_LIMIT = 64 * MEBIBYTE  # of a document that is read as a whole
LINE_LIMIT = 16 * MEBIBYTE  # of one line of JSONL; the file may be of any size
_ENTRY_LIMIT = 100_000  # of a folder that is looked through

_FLAGS = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "wb": os.O_WRONLY | os.O_CREAT}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
Record = TypeVar("Record")


class UnreadableFileError(ConfigError):
    """A file that is damaged, of the wrong kind, too large, or leads out of its folder."""


class MissingFileError(UnreadableFileError):
    """A file that is not there."""


@dataclass(frozen=True)
class JsonLine:
    """One whole line of a JSONL file."""

    number: int  # counted from 1
    end: int  # offset of the byte behind it
    record: dict[str, Any]


@dataclass(frozen=True)
class JsonLines:
    """The whole lines of a JSONL file, and what a process that was killed left behind them."""

    path: Path
    lines: tuple[JsonLine, ...]
    broken_off: bool  # the last line has no end, and is not among the lines

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records, in order."""
        return [line.record for line in self.lines]

    @property
    def whole_bytes(self) -> int:
        """Where the last whole line ends: what a writer that goes on truncates the file to."""
        return self.lines[-1].end if self.lines else 0

    @property
    def note(self) -> str | None:
        """What a reader should be told; None: nothing."""
        if not self.broken_off:
            return None
        return f"{self.path}: the last line was broken off and is left out (line {len(self.lines) + 1})"


def open_inside(path: Path, inside: Path, mode: Literal["rb", "ab", "wb"] = "rb") -> BinaryIO:
    """Open a plain file for reading, appending or writing; pipes, devices and links out are refused.

    ``inside`` is the folder that the file must really be in; it may itself be reached by a link.
    """
    return open_plain(_inside(path, inside), mode, shown=path)


def open_plain(path: Path, mode: Literal["rb", "ab", "wb"] = "rb", shown: Path | None = None) -> BinaryIO:
    """Open a plain file, wherever it is: never waits for a pipe. ``shown`` names it in errors."""
    shown = shown or path
    try:
        if path.exists() or mode == "rb":  # looked at before it is opened: opening a device may do something
            _check_plain(path.stat(), shown)
        descriptor = os.open(path, _FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            _check_plain(os.fstat(descriptor), shown)  # it may have been exchanged in between
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
        raise UnreadableFileError(f"{shown} cannot be opened: {reason(error)}") from error


def reason(error: OSError | ValueError) -> str:
    """Why, in the system's words, without the path that the message names anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def check_inside(path: Path, inside: Path) -> None:
    """Refuse a path that leads out of a folder, whether it exists or not."""
    _inside(path, inside)


def check_file(path: Path, inside: Path) -> None:
    """Refuse a place to write a file to that leads out of the folder, or where something else is."""
    real = _inside(path, inside)
    if os.path.exists(real):
        _check_plain(real.stat(), path)


def check_tree(folder: Path, inside: Path) -> None:
    """Refuse a folder, all levels down, that others' code is to read if anything in it is no plain file or
    folder or leads out of ``inside``."""
    left, seen = [folder], 0
    check_inside(folder, inside)
    while left:
        try:
            entries = sorted(left.pop().iterdir())
        except OSError as error:
            raise UnreadableFileError(f"{folder} cannot be looked through: {reason(error)}") from error
        for entry in entries:
            seen += 1
            if seen > _ENTRY_LIMIT:
                raise UnreadableFileError(f"{folder} holds more than {_ENTRY_LIMIT:,} files; is it a run's?")
            check_inside(entry, inside)
            if entry.is_dir() and not entry.is_symlink():
                left.append(entry)
            elif not entry.is_dir():
                open_inside(entry, inside).close()


def read_text(path: Path, inside: Path | None = None, limit: int = DOCUMENT_LIMIT) -> str:
    """A text file as a whole. Without ``inside`` it may be anywhere."""
    with open_plain(path) if inside is None else open_inside(path, inside) as file:
        try:
            content = file.read(limit + 1)
        except OSError as error:
            raise UnreadableFileError(f"{path} cannot be read: {reason(error)}") from error
    if len(content) > limit:
        raise UnreadableFileError(
            f"{path} is larger than {limit / MEBIBYTE:g} MiB: it is not what it should be"
        )
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"{path} is not UTF-8 text (at byte {error.start})") from error


def read_json(path: Path, inside: Path, limit: int = DOCUMENT_LIMIT) -> Any:
    """A JSON document."""
    return _parsed(read_text(path, inside, limit), str(path))


def read_jsonl(path: Path, inside: Path) -> JsonLines:
    """All records of a JSONL file; see :func:`iterate_jsonl` for files that need not fit into memory."""
    lines = tuple(iterate_jsonl(path, inside))
    with open_inside(path, inside) as file:
        size = file.seek(0, os.SEEK_END)
    return JsonLines(path, lines, broken_off=size > (lines[-1].end if lines else 0))


def iterate_jsonl(path: Path, inside: Path) -> Iterator[JsonLine]:
    """Whole lines one by one. A last line without an end, which a killed process leaves, is left out;
    anything wrong before it is an error."""
    end = 0
    with open_inside(path, inside) as file:
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
            record = _parsed(text, where)
            if not isinstance(record, dict):
                raise UnreadableFileError(
                    f"{where} is damaged: it is not a record but {type(record).__name__}"
                )
            yield JsonLine(number, end, record)


def as_record(data: Any, kind: type[Record], where: str) -> Record:
    """Data that was read, as a dataclass: every field there and of its type. ``where`` names it in errors."""
    from pydantic import ValidationError

    try:
        # as JSON, of which lists are tuples too
        record: Record = _adapter(cast(Any, kind)).validate_json(json.dumps(data), strict=True)
        return record
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or "its content"
        wrong = first["msg"].replace("Input should be", "must be").replace("an object", "a mapping")
        wrong = "missing" if first["type"] == "missing" else f"{wrong[:1].lower()}{wrong[1:]}"
        raise UnreadableFileError(f"{where} is damaged or of another version: {key}: {wrong}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _inside(path: Path, inside: Path) -> Path:
    """Where a path really leads, which must be in the folder."""
    try:
        real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(inside))
    except (OSError, ValueError) as error:
        raise UnreadableFileError(f"{path!s} cannot be looked at: {reason(error)}") from error
    if real != folder and folder not in real.parents:
        raise UnreadableFileError(
            f"{path} leads out of {inside}, to {real}; a link out of a run's folder is not followed: "
            "put a copy in its place"
        )
    return real


def _check_plain(status: os.stat_result, shown: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnreadableFileError(f"{shown} is {kind}, not a file")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a RecursionError: nested too deeply
        raise UnreadableFileError(f"{where} is damaged: it is not valid JSON ({error})") from error


_CHUNK = 1 << 22


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once."""
    write_text(path, json.dumps(value, ensure_ascii=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(unfinished: Path, final: Path) -> None:
    """Give a finished folder its name; what had that name goes."""
    for path in (*unfinished.rglob("*"), unfinished):
        sync(path)
    if final.exists():
        doomed = final.with_name(f".{final.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        final.rename(doomed)
        unfinished.rename(final)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        unfinished.rename(final)
    sync(final.parent)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
    return total.hexdigest()
