"""YAML and ``key=value`` in, a checked :class:`RunConfig` out, or an error that says what to change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from hacrl.algorithms.settings import HacpoSettings
from hacrl.config.checks import check_config
from hacrl.config.explain import explain
from hacrl.config.overrides import apply_override
from hacrl.config.schema import RunConfig
from hacrl.config.yaml_loader import parse_yaml
from hacrl.errors import ConfigError

_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe; without ``output`` the run goes to ``runs/<name of the file>``."""
    data = read_recipe(path)
    data.setdefault("output", f"runs/{path.stem}")
    for override in overrides:
        apply_override(data, override)
    return build_config(data, source=str(path))


def read_recipe(path: Path) -> dict[str, Any]:
    """The recipe's mapping, unchecked. A bare name such as ``demo`` is a recipe that comes with hacrl."""
    if path.name == str(path) and not path.suffix and not path.is_file():
        path = shipped_recipes().get(path.name, path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = ", ".join(shipped_recipes())
        raise ConfigError(
            f"config file {path} does not exist; recipes that come with hacrl: {shipped}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(
            f"config file {path} must be a mapping of keys to values, not {type(data).__name__}"
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
    data = with_agent_defaults(with_names(data))
    try:
        # As JSON: strict validation then takes lists and mappings, but no guessed types.
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError) as error:
        key = ".".join(_not_plain(data))
        raise ConfigError(f"{source}: {key}: only plain, finite values are allowed: {error}") from error
    try:
        config = _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{source}:\n" + "\n".join(explain(error, data))) from None
    check_config(config)
    return config


def _not_plain(value: Any) -> list[str]:
    """Keys that lead to the first value JSON cannot hold."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        try:
            json.dumps(part, allow_nan=False)
        except (TypeError, ValueError):
            return [str(key), *_not_plain(part)]
    return []


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
        raise ConfigError(f"agent_defaults must be a mapping of keys to values, not {defaults!r}")
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
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
