"""Load what a recipe names: a built-in, ``module:attribute``, ``file.py:attribute``, or an entry point."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from hacrl.errors import ConfigError, HacrlError, TaskError


def load_plugin(
    kind: str,
    name: str,
    builtin: Mapping[str, object],
    entry_point_group: str,
    *,
    key: str,
    other_names: Sequence[str] = (),
    error_type: type[HacrlError] = ConfigError,
) -> Any:
    """Return what ``name`` stands for: a built-in, a reference, or an entry point of an installed package.

    ``builtin`` maps a name to an object, or to the text ``module:attribute``, which is imported only when
    asked for. Built-in names cannot be replaced by entry points. An unknown name is raised as
    ``error_type``, with a message that begins with the config ``key``, suggests the nearest name, and lists
    all names; ``other_names`` are listed as well. ``kind`` is the word for it, e.g. ``"task"``.
    """
    if name in builtin:
        found = builtin[name]
        if not isinstance(found, str):
            return found
        module, _, attribute = found.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if is_reference(name):
        return load_reference(name, key, error_type)
    installed = installed_plugins(entry_point_group)
    if name in installed:
        return load_reference(installed[name], key, error_type)
    short_names = list(dict.fromkeys((*builtin, *installed)))
    near = get_close_matches(name, short_names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    names = [*short_names, *other_names, "package.module:attribute", "path/to/file.py:attribute"]
    raise error_type(f"{key}: there is no {kind} {name!r}{hint} Valid names: {', '.join(names)}")


def is_reference(name: str) -> bool:
    """Return whether a name is ``module:attribute`` or ``file.py:attribute``."""
    place, colon, attribute = name.rpartition(":")
    return bool(colon and place and attribute.replace(".", "").isidentifier())


def load_reference(reference: str, key: str, error_type: type[HacrlError]) -> Any:
    """Import ``package.module:name`` or ``path/to/file.py:name`` and return what the name stands for.

    Modules in the working folder are found too, and a file finds modules beside it. Any failure is raised as
    ``error_type``, with a message that begins with the config ``key``.
    """
    place, _, attribute = reference.rpartition(":")
    try:
        module = _load_file(Path(place), key, error_type) if place.endswith(".py") else _import(place)
    except error_type:
        raise
    except Exception as error:  # the user's own module may raise anything when it is imported
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


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function; none if Python does not know them."""
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # of a class written in C
        return {}


def check_options(
    subject: str,
    factory: Callable[..., Any],
    options: Mapping[str, object],
    *,
    key: str,
    given: Collection[str] = (),
    presets: Collection[str] = (),
    error_type: type[HacrlError] = ConfigError,
) -> None:
    """Raise ``error_type`` if ``factory`` does not take one of the options, or needs one that is missing.

    ``subject`` is the plug-in in words, e.g. ``"task 'math'"``; ``key`` is the config key of the options.
    hacrl gives the parameters in ``given``: they are no options. ``presets`` are options with a value.
    """
    kinds = inspect.Parameter
    parameters = {name: parameter for name, parameter in parameters_of(factory).items() if name not in given}
    takes_any = any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters.values())
    known = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL, kinds.POSITIONAL_ONLY)
    ]
    for option in options:
        if option in given or (option not in known and not takes_any):
            near = get_close_matches(option, known, n=1)
            takes = ", ".join(known) or "none"
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {takes}"
            raise error_type(f"{key}.{option}: unknown option of {subject}{hint}")
    for name in known:
        if parameters[name].default is kinds.empty and name not in options and name not in presets:
            raise error_type(f"{key}.{name}: missing; {subject} needs it")


def installed_plugins(entry_point_group: str) -> dict[str, str]:
    """Return name -> ``module:attribute`` of the entry points of all installed packages in a group."""
    return {entry.name: entry.value.replace(" ", "") for entry in entry_points(group=entry_point_group)}


def optional_module(name: str, *, extra: str, needed_for: str) -> Any:
    """Import a library that only some tasks need.

    Raise :class:`TaskError` with the pip command if the import fails; ``extra`` is hacrl's extra for it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TaskError(
            f"{needed_for} needs the package {name.partition('.')[0]!r}, which cannot be imported ({error}); "
            f"install it with: pip install 'hacrl[{extra}]'"
        ) from error


_FILES: dict[tuple[Path, int, int], ModuleType] = {}  # by path, time of the last change, and size


def _load_file(path: Path, key: str, error_type: type[HacrlError]) -> ModuleType:
    """Import a file, which may import modules beside it; import it again only if it has changed."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise error_type(f"{key}: {path} does not exist")
    found = path.stat()
    version = (path, found.st_mtime_ns, found.st_size)
    if version in _FILES:
        return _FILES[version]
    name = f"hacrl_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module there
    try:
        with _on_path(path.parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[version] = module
    return module


def _import(name: str) -> Any:
    """Import a module, from the working folder too, which is not on the path of a console script."""
    with _on_path(Path.cwd()):
        return importlib.import_module(name)


@contextmanager
def _on_path(folder: Path) -> Iterator[None]:
    """Let modules of a folder be imported within the block, if no others have their names."""
    sys.path.append(str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
