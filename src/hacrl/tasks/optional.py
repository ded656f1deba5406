"""Libraries that only some tasks need: imported when asked for, or an error that says how to get them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hacrl.errors import TaskError


def optional_module(name: str, *, extra: str, needed_for: str) -> Any:
    """The module, or a :class:`TaskError` with the pip command; ``extra`` is hacrl's own extra for it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TaskError(
            f"{needed_for} needs the package {name.partition('.')[0]!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hacrl[{extra}]'"
        ) from error
