"""The reference of all keys of a recipe, made from the settings records and the texts under their fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hacrl.config.method import METHOD_SETTINGS
from hacrl.config.method_base import MethodSettings
from hacrl.config.schema import HacpoSettings, PluginMethodSettings, RunConfig
from hacrl.config.settings import Settings

_OWN_METHODS = "methods of your own"
_PLAIN_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class SettingDescription:
    """One key of a recipe."""

    key: str  # dotted; `agents[]` stands for any agent
    type: str
    default: str  # as in YAML; empty: the key is required
    description: str


def describe_settings() -> Iterator[SettingDescription]:
    """Yield every key of a recipe, in the order of the records, a record's own keys before its sections."""
    yield from _describe_record(RunConfig, "")


def configuration_page() -> str:
    """Return ``docs/configuration.md``: a table for each section of a recipe."""
    sections: dict[str, list[SettingDescription]] = {}
    for setting in describe_settings():
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    lines = [_PAGE_HEAD]
    for section, settings in sections.items():
        lines += [f"## `{section}`" if section else "## The run", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for setting in settings:
            default = f"`{setting.default}`" if setting.default else "required"
            lines.append(f"| `{setting.key}` | {setting.type} | {default} | {setting.description} |")
        lines.append("")
    return "\n".join(lines)


def field_descriptions(record: type) -> dict[str, str]:
    """Return the string literal under each field of a settings record, those of its base classes included."""
    found: dict[str, str] = {}
    for part in reversed(record.__mro__):
        if issubclass(part, Settings):
            found |= _own_descriptions(part)
    return found


def _own_descriptions(record: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(text))):
                found[statement.target.id] = " ".join(text.split())
    return found


def _describe_record(record: type, prefix: str) -> Iterator[SettingDescription]:
    """Yield a record's own keys, then those of the sections in it."""
    hints, descriptions = typing.get_type_hints(record), field_descriptions(record)
    sections = []
    for field in dataclasses.fields(record):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if _is_method(hint):
            sections.append(_describe_methods(f"{key}."))
        elif (inner := _record_in(hint)) is not None:
            is_list = typing.get_origin(hint) is tuple
            sections.append(_describe_record(inner, f"{key}[]." if is_list else f"{key}."))
        else:
            default = _default_of(field)
            yield SettingDescription(key, _type_name(hint), default, descriptions.get(field.name, ""))
    for section in sections:
        yield from section


def _describe_methods(prefix: str) -> Iterator[SettingDescription]:
    """Yield the keys of all methods, each once: as HACPO has it, and where other methods differ from it."""
    methods = {**METHOD_SETTINGS, _OWN_METHODS: PluginMethodSettings}
    names = " or ".join((*METHOD_SETTINGS, "module:attribute"))
    text = field_descriptions(PluginMethodSettings)["name"]
    yield SettingDescription(f"{prefix}name", names, HacpoSettings.name, text)
    by_key: dict[str, dict[str, SettingDescription]] = {}
    for name in (HacpoSettings.name, *methods):
        for setting in _describe_record(methods[name], prefix):
            by_key.setdefault(setting.key, {})[name] = setting
    del by_key[f"{prefix}name"]
    for found in by_key.values():
        setting = next(iter(found.values()))
        text = setting.description
        for name, other in found.items():
            text += f" Default of {name}: {other.default}." if other.default != setting.default else ""
        text += f" Only {' and '.join(sorted(found))}." if len(found) < len(methods) else ""
        yield dataclasses.replace(setting, description=text)


def _is_method(hint: Any) -> bool:
    """Return whether an annotation is the union of the methods' settings."""
    parts = typing.get_args(hint)
    return bool(parts) and all(isinstance(part, type) and issubclass(part, MethodSettings) for part in parts)


def _record_in(hint: Any) -> type | None:
    """Return the settings record of an annotation such as ``X``, ``X | None`` or ``tuple[X, ...]``."""
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and issubclass(part, Settings):
            return part
    return None


def _type_name(hint: Any) -> str:
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(part) for part in parts if part is not type(None))
    if origin is typing.Literal:
        return " or ".join(str(part) for part in parts)
    if origin is tuple and parts[-1] is not Ellipsis:
        return f"list of {len(parts)}: {', '.join(_type_name(part) for part in parts)}"
    if origin is tuple:
        return f"list of {_type_name(parts[0])}"
    if origin in (dict, Mapping):
        return "mapping"
    raise TypeError(f"no name for the type {hint}")


def _default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


_PAGE_HEAD = """# Configuration

Every key of a recipe, and of `HACRLConfig` in Python. On the command line `key=value` sets a key, in full
(`learning.lr=2e-6`) or, if only one section has it, in short (`lr=2e-6`). An agent is addressed by name or
position (`agents.small.lr=1e-5`). `agent_defaults` holds keys that every agent takes over unless it has its
own.

A default of `null` means that the key is not set; the last column says what counts then. A run's
`config.yaml` holds every other key. It has `agents[].lora` only if that is set, and `agents[].vllm` only with
another engine than `transformers` or if a key in it is set.

`scripts/write_configuration_reference.py` writes this page from `src/hacrl/config/`.
"""
