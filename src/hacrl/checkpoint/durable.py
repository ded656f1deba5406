"""Writing that survives a crash: either the old is there, or the new, never half of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

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
