"""``key=value`` on the command line.

``learning.lr=2e-6`` names the key in full; ``lr=2e-6`` works too if only one section has such a key.
Agents are addressed by position or name: ``agents.0.model=...``, ``agents.ada.lr=...``.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hacrl.config.plain import one_line, shown, shown_key
from hacrl.config.schema import RunConfig
from hacrl.config.yaml_loader import parse_yaml
from hacrl.errors import ConfigError
from hacrl.evaluation.settings import EvaluationSettings
from hacrl.learning.settings import LearningSettings
from hacrl.rollout.settings import RolloutSettings

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
