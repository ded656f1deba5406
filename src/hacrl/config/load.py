"""Load a run's config: a recipe in YAML and ``key=value`` overrides in, a checked :class:`RunConfig` out.

A recipe's text is not trusted: it yields plain values only, and a small text cannot become a huge value. The
YAML is what people expect: ``1e-6`` is a number, and a key that stands twice is an error.

An override names its key in full, ``learning.lr=2e-6``, or in short, ``lr=2e-6``, if only one section has it.
Agents are addressed by position or name: ``agents.0.model=...``, ``agents.ada.lr=...``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from hacrl.config.checks import check_config
from hacrl.config.explain import explain
from hacrl.config.schema import (
    EvaluationSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
    VllmSettings,
)
from hacrl.config.task import RESPONSE_TOKENS
from hacrl.config.values import DEEPEST, MOST_VALUES, check_plain, one_line, shown, shown_key
from hacrl.errors import ConfigError
from hacrl.files import MEBIBYTE, MissingFileError, UnreadableFileError, read_text

_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)
RECIPE_LIMIT = MEBIBYTE // 4  # a recipe has a few kilobytes; YAML is slow to read
_KINDS = {type(None): "empty", list: "a list", int: "a number", float: "a number", bool: "true or false"}


def load_config(path: Path, overrides: Sequence[str] = (), inside: Path | None = None) -> RunConfig:
    """Return a recipe's checked config; ``output`` is ``runs/<name of the file>`` unless set.

    ``inside``: a folder that the file must lie in, links followed, for a run's own config.
    """
    data = read_recipe(path, inside)
    data.setdefault("output", f"runs/{path.stem}")
    for override in overrides:
        apply_override(data, override)
    return build_config(data, source=str(path))


def read_recipe(path: Path, inside: Path | None = None) -> dict[str, Any]:
    """Return a recipe's mapping, unchecked. A bare name such as ``demo`` is a recipe of hacrl's own."""
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
    """Return name -> file of the recipes that come with hacrl, in an installed package or a clone."""
    package = Path(str(files("hacrl")))
    installed, cloned = package / "recipes", package.parent.parent / "recipes"
    folder = installed if installed.is_dir() else cloned
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def build_config(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Return a mapping's config. Refuse unknown keys, wrong types and impossible combinations."""
    check_plain(data, source)
    with _named(source):
        data = with_response_length(with_agent_defaults(with_names(data)))
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
    """Put the name of the file in front of errors of checks that do not know it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def with_names(data: dict[str, Any]) -> dict[str, Any]:
    """Write out short forms: ``task: gsm8k`` for ``task: {name: gsm8k}``. The method's default is HACPO."""
    if isinstance(data.get("task"), str):
        data = {**data, "task": {"name": data["task"]}}
    method = data.get("method", {})
    if isinstance(method, str):
        return {**data, "method": {"name": method}}
    if isinstance(method, dict):
        return {**data, "method": {"name": HacpoSettings.name, **method}}
    return data


def with_response_length(data: dict[str, Any]) -> dict[str, Any]:
    """Set ``rollout.max_new_tokens`` to what the task needs, if the recipe does not set it."""
    task, rollout = data.get("task"), data.get("rollout", {})
    if not (isinstance(task, dict) and isinstance(rollout, dict)) or "max_new_tokens" in rollout:
        return data
    tokens = RESPONSE_TOKENS.get(str(task.get("name")).partition(":")[0])
    return data if tokens is None else {**data, "rollout": {**rollout, "max_new_tokens": tokens}}


def with_agent_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Write ``agent_defaults`` into every agent; an agent's own keys win, nested keys too."""
    rest = {key: value for key, value in data.items() if key != "agent_defaults"}
    defaults, agents = data.get("agent_defaults") or {}, data.get("agents")
    if not isinstance(defaults, dict):
        raise ConfigError(f"agent_defaults must be a mapping of keys to values, not {shown(defaults)}")
    if not isinstance(agents, list):
        return rest  # the validation refuses it
    filled = [_merged(defaults, agent) if isinstance(agent, dict) else agent for agent in agents]
    return {**rest, "agents": filled}


def _merged(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **own}
    for key in defaults.keys() & own.keys():
        if isinstance(defaults[key], dict) and isinstance(own[key], dict):
            merged[key] = _merged(defaults[key], own[key])
    return merged


def config_to_yaml(config: RunConfig) -> str:
    """Return the resolved config, defaults included, as YAML that :func:`load_config` reads back.

    Two kinds of keys are left out, because loading restores them: keys that are not set (null), and the
    ``vllm`` section of an agent with the default engine, if nothing is set in it.
    """
    resolved = _resolved(config)
    for agent, section in zip(config.agents, resolved["agents"], strict=True):
        if config.engine(agent) == RolloutSettings.engine and agent.vllm == VllmSettings():
            del section["vllm"]
    return dump_yaml(resolved)


def _resolved(value: Any) -> Any:
    """Return a record as plain values, ``name`` first, without the keys that are not set."""
    if is_dataclass(value):
        names = sorted(
            (field.name for field in fields(value) if not _is_unset(value, field)), key="name".__ne__
        )
        return {name: _resolved(getattr(value, name)) for name in names}
    return [_resolved(part) for part in value] if isinstance(value, tuple) else value


def _is_unset(record: Any, field: Field[Any]) -> bool:
    return field.default is None and getattr(record, field.name) is None


# Sections whose keys may be given without the section's name.
_SECTIONS: dict[str, type] = {
    "rollout": RolloutSettings,
    "learning": LearningSettings,
    "evaluation": EvaluationSettings,
}
_HAVE_SHORT_FORM = ("task", "method")  # task: gsm8k is task: {name: gsm8k}


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one key of a recipe, in place."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {shown(override)} must have the form key=value, e.g. learning.lr=1e-6")
    *parents, last = _full_key(key).split(".")
    key = shown_key([key])  # for errors
    value = parse_yaml(text, f"value of {key}")
    if parents and parents[0] in _HAVE_SHORT_FORM and isinstance(data.get(parents[0]), str):
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
        raise ConfigError(f"override {key} could be {' or '.join(f'{name}.{key}' for name in sections)}")
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


# PyYAML follows YAML 1.1, in which 1e-6 is text. The pattern matches in one way only: it cannot backtrack.
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
    """Return the plain values of untrusted YAML text; ``source`` names the text in errors."""
    loader = _Loader("")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_values(node, {}, 0) > MOST_VALUES:
            raise ConfigError(
                f"{source} is not a recipe: with its aliases it has more than {MOST_VALUES:,} values"
            )
        return loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        if isinstance(error, ConfigError):
            raise
        # PyYAML does not catch errors of its own constructors, e.g. IndexError for !!int ""
        raise ConfigError(f"{source} is not valid YAML: {one_line(_yaml_problem(error))}") from error
    finally:
        loader.dispose()


def dump_yaml(data: Any) -> str:
    """Return YAML that :func:`parse_yaml` reads back as the same plain data."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _count_values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return the number of values of a node once aliases and merges are written out."""
    if depth > 2 * DEEPEST:
        raise RecursionError
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # for a node that contains itself
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_count_values(part, known, depth + 1) for part in parts)
    return known[id(node)]


def _yaml_problem(error: Exception) -> str:
    """Return what is wrong and where, without PyYAML's excerpt of the text."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        what = ", ".join(part for part in (error.context, error.problem) if part)
        return re.sub(r"tag:yaml\.org,2002:", "!!", what) + where
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    return f"a value does not fit its tag ({type(error).__name__}: {error})"
