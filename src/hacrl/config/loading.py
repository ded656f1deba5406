"""YAML and ``key=value`` in, a checked :class:`RunConfig` out, or an error that says what to change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hacrl.algorithms.settings import HacpoSettings
from hacrl.config.checks import check_config
from hacrl.config.explain import explain
from hacrl.config.overrides import apply_override
from hacrl.config.plain import check_plain, shown
from hacrl.config.schema import RunConfig
from hacrl.config.yaml_loader import dump_yaml, parse_yaml
from hacrl.errors import ConfigError
from hacrl.safe_files import MEBIBYTE, MissingFileError, UnreadableFileError, read_text

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
