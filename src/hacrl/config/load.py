"""YAML and ``key=value`` in, a checked :class:`RunConfig` out, or an error that says what to change.

``key=value`` on the command line.

``learning.lr=2e-6`` names the key in full; ``lr=2e-6`` works too if only one section has such a key.
Agents are addressed by position or name: ``agents.0.model=...``, ``agents.ada.lr=...``.

YAML as people expect it: ``1e-6`` is a number, and a key that stands twice is an error.

The text is not trusted: only plain values come of it, and a small text cannot become a huge value.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from hacrl.config.checks import check_config
from hacrl.config.explain import explain
from hacrl.config.plain import DEEPEST, MOST_VALUES, check_plain, one_line, shown, shown_key
from hacrl.config.schema import (
    EvaluationSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
)
from hacrl.errors import ConfigError
from hacrl.files import MEBIBYTE, MissingFileError, UnreadableFileError, read_text

_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)
RECIPE_LIMIT = MEBIBYTE // 4  # a recipe has a few kilobytes; YAML is slow to read
_KINDS = {type(None): "empty", list: "a list", int: "a number", float: "a number", bool: "true or false"}


def load_config(path: Path, overrides: Sequence[str] = (), inside: Path | None = None) -> RunConfig:
    """Read a recipe; without ``output`` the run goes to ``runs/<name of the file>``.

    ``inside`` is the folder that the file must really be in, for a run's own config.
    """
    data = read_recipe(path, inside)
    data.setdefault("output", f"runs/{path.stem}")
    for override in overrides:
        apply_override(data, override)
    return build_config(data, source=str(path))


def read_recipe(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """The recipe's mapping, unchecked. A bare name such as ``demo`` is a recipe that comes with hacrl."""
    if path.name == str(path) and not path.suffix and not os.path.isfile(path):
        path = shipped_recipes().get(path.name, path)
    try:
        text = read_text(path, inside, RECIPE_LIMIT)
    except MissingFileError:
        shipped = ", ".join(shipped_recipes())
        raise ConfigError(
            f"config file {path} does not exist; recipes that come with hacrl: {shipped}"
        ) from None
    except UnreadableFileError as error:
        raise ConfigError(f"config file cannot be read: {error}") from error
    data = parse_yaml(text, f"config file {path}")
    if not isinstance(data, dict):
        raise ConfigError(
            f"config file {path} must be a mapping of keys to values, not {_KINDS.get(type(data), 'text')}"
        )
    return data


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with hacrl, installed or in a clone."""
    package = Path(str(files("hacrl")))
    installed, cloned = package / "recipes", package.parent.parent / "recipes"
    folder = installed if installed.is_dir() else cloned
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def build_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a mapping, strictly: unknown keys, wrong types and impossible combinations are refused."""
    check_plain(data, source)
    with _named(source):
        data = with_agent_defaults(with_names(data))
    # As JSON: strict validation then takes lists and mappings, but no guessed types.
    text = json.dumps(data, allow_nan=False)
    try:
        config = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n" + "\n".join(explain(error, data))) from None
    with _named(source):
        check_config(config)
    return config


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Errors of checks that do not know which file they are about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def with_names(data: dict[str, Any]) -> dict[str, Any]:
    """``task: gsm8k`` for ``task: {name: gsm8k}``, and so for method; one without a name is HACPO's."""
    if isinstance(data.get("task"), str):
        data = {**data, "task": {"name": data["task"]}}
    method = data.get("method", {})
    if isinstance(method, str):
        return {**data, "method": {"name": method}}
    if isinstance(method, dict):
        return {**data, "method": {"name": HacpoSettings.name, **method}}
    return data


def with_agent_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """What ``agent_defaults`` says, written into every agent; an agent's own keys win, nested ones too."""
    rest = {key: value for key, value in data.items() if key != "agent_defaults"}
    defaults, agents = data.get("agent_defaults") or {}, data.get("agents")
    if not isinstance(defaults, dict):
        raise ConfigError(f"agent_defaults must be a mapping of keys to values, not {shown(defaults)}")
    if not isinstance(agents, list):
        return rest  # which the validation refuses
    filled = [_merged(defaults, agent) if isinstance(agent, dict) else agent for agent in agents]
    return {**rest, "agents": filled}


def _merged(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = _merged(defaults[key], own[key])
    return merged


def config_to_yaml(config: RunConfig) -> str:
    """The resolved config: every key, defaults included; :func:`load_config` reads it back."""
    plain = json.loads(json.dumps(asdict(config)))
    return dump_yaml(plain)


# Sections whose keys may be given without the section's name.
_SECTIONS: dict[str, type] = {
    "rollout": RolloutSettings,
    "learning": LearningSettings,
    "evaluation": EvaluationSettings,
}
_NAMED_SHORTLY = ("task", "method")  # task: gsm8k is task: {name: gsm8k}


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one key of a recipe, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} must have the form key=value, e.g. learning.lr=1e-6")
    *parents, last = _full_key(key).split(".")
    key = shown_key([key])  # for errors
    value = parse_yaml(text, f"value of {key}")
    if parents and parents[0] in _NAMED_SHORTLY and isinstance(data.get(parents[0]), str):
        data[parents[0]] = {"name": data[parents[0]]}
    node: Any = data
    for parent in parents:
        node = _descend(node, parent, key)
    if isinstance(node, list):
        node[_position(node, last, key)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigError(f"override {key}: {shown(parents[-1])} is a plain value and has no keys")


def _full_key(key: str) -> str:
    top_level = {field.name for field in fields(RunConfig)} | {"agent_defaults"}
    if "." in key or key in top_level:
        return key
    sections = [name for name, record in _SECTIONS.items() if key in {f.name for f in fields(record)}]
    if len(sections) == 1:
        return f"{sections[0]}.{key}"
    if len(sections) > 1:
        raise ConfigError(f"override {key}: say which: {' or '.join(f'{name}.{key}' for name in sections)}")
    return key  # unknown: the validation names the nearest key


def _descend(node: Any, part: str, key: str) -> Any:
    if isinstance(node, list):
        return node[_position(node, part, key)]
    if isinstance(node, dict):
        return node.setdefault(part, {})
    raise ConfigError(f"override {key}: there is nothing below {shown(part)}")


def _position(items: list[Any], part: str, key: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if part in names:
        return names.index(part)
    if part.isdecimal() and len(part) < 10 and int(part) < len(items):
        return int(part)
    there = one_line(", ".join(shown_key([name]) for name in names[:10])) or "none"
    raise ConfigError(f"override {key}: there is no entry {shown(part)}; there are {there}")


# PyYAML follows YAML 1.1, in which 1e-6 is text. One way only to match any text: no search takes long.
_FLOAT = (
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _Loader(yaml.SafeLoader):
    """Safe loader with YAML 1.2 floats and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key)} must be text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {shown(key)} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads back as itself: text such as ``1e-6`` is quoted."""


_Loader.add_implicit_resolver(*_FLOAT)
_Dumper.add_implicit_resolver(*_FLOAT)


def parse_yaml(text: str, source: str) -> Any:
    """Parse untrusted YAML text; ``source`` names it in errors."""
    loader = _Loader("")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _weight(node, {}, 0) > MOST_VALUES:
            raise ConfigError(
                f"{source} is not a recipe: with its aliases it has more than {MOST_VALUES:,} values"
            )
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        # PyYAML lets the errors of its own constructors through: IndexError for !!int "", and so on
        raise ConfigError(f"{source} is not valid YAML: {one_line(_told(error))}") from error
    finally:
        loader.dispose()


def dump_yaml(data: Any) -> str:
    """YAML that :func:`parse_yaml` reads back as the same plain data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _weight(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """How many values a node stands for once aliases and merges are written out."""
    if depth > 2 * DEEPEST:
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # until it is known, for a node that contains itself
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_weight(part, known, depth + 1) for part in parts)
    return known[id(node)]


def _told(error: Exception) -> str:
    """What is wrong and where, without PyYAML's excerpt of the text."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        said = ", ".join(part for part in (error.context, error.problem) if part)
        return re.sub(r"tag:yaml\.org,2002:", "!!", said) + where
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    return f"a value does not fit its tag ({type(error).__name__}: {error})"
