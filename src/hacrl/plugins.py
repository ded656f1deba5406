"""Code of others that a recipe names: ``module:attribute``, ``file.py:attribute``, or an entry point.

Libraries that only some tasks need: imported when asked for, or an error that says how to get them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hacrl.errors import HacrlError, TaskError


def is_reference(name: str) -> bool:
    """Return whether a name is ``module:attribute`` or ``file.py:attribute``."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon and place and attribute.replace(".", "").isidentifier())


def load_reference(reference: str, key: str, error_type: type[HacrlError]) -> Any:
    """Import ``package.module:name`` or ``path/to/file.py:name`` and return what the name stands for.

    Modules of the working folder are found too. What goes wrong is raised as ``error_type``, with a message
    that begins with the config ``key``.
    """
    place, _, attribute = reference.rpartition(":")
    try:
        module = _load_file(Path(place), key, error_type) if place.endswith(".py") else _import(place)
    except error_type:
        raise
    except Exception as error:  # whatever the user's own module does when it is imported
        raise error_type(
            f"{key}: {reference!r}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(module) if not name.startswith("_")]
            near = get_close_matches(part, public, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise error_type(f"{key}: {reference!r}: {place} has no {attribute!r}{hint}")
        found = getattr(found, part)
    return found


def installed_plugins(group: str) -> dict[str, str]:
    """Return name -> ``module:attribute`` of what installed packages offer under an entry point group."""
    return {one.name: one.value.replace(" ", "") for one in entry_points(group=group)}


def _load_file(path: Path, key: str, error_type: type[HacrlError]) -> Any:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise error_type(f"{key}: {path} does not exist")
    name = f"hacrl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import(name: str) -> Any:
    """Import a module; one in the working folder too, which a console script does not have on its path."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


def optional_module(name: str, *, extra: str, needed_for: str) -> Any:
    """The module, or a :class:`TaskError` with the pip command; ``extra`` is hacrl's own extra for it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise TaskError(
            f"{needed_for} needs the package {name.partition('.')[0]!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hacrl[{extra}]'"
        ) from error
