"""Describe a method as a tool: its name, what it does, and the JSON schema of its arguments.

The schemas equal those of ``transformers.utils.get_json_schema``, which imports torch.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hacrl.types import Tool

_JSON_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_SECTION = re.compile(r"^\s*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", re.DOTALL)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_of(method: Callable[..., Any], name: str) -> Tool:
    """Return the tool that a method is. Raise ValueError if it lacks a type hint or a description.

    ``name`` is the method's, as agents call it. The description and those of the arguments come from the
    docstring in Google's style; ``(choices: ["a", "b"])`` at the end of an argument's becomes an ``enum``.
    """
    description, arguments = _read_docstring(inspect.getdoc(method) or "")
    if not description:
        raise ValueError(f"the tool {name!r} has no docstring; describe there what it does")
    hints = get_type_hints(method)
    properties: dict[str, Any] = {}
    required = []
    for parameter in _parameters(method):
        where = f"the tool {name!r}: the argument {parameter.name!r}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{where} stands for any number of arguments, which no schema can describe")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ValueError(f"{where} has no name for the agent to give; remove the '/'")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{where} has no type hint")
        if parameter.name not in arguments:
            raise ValueError(f"{where} has no line in the docstring's section 'Args:'")
        try:
            schema = _schema_of(hints[parameter.name])
        except TypeError as error:
            raise ValueError(f"{where}: {error}") from None
        text = arguments[parameter.name]
        choices = _CHOICES.search(text)
        if choices:
            schema["enum"] = json.loads(choices[1])
            text = text[: choices.start()].strip()
        properties[parameter.name] = {**schema, "description": text}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return Tool(name, description, json.dumps(parameters))


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a caller gives."""
    parameters = list(inspect.signature(method).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and not inspect.ismethod(method):
        return parameters[1:]
    return parameters


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and argument -> description, of a docstring without indentation."""
    parts = _SECTION.split(text)
    description = parts[0].strip()
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = [line for line in sections.get("Args", "").splitlines() if line.strip()]
    if not lines:
        return description, {}
    indent = min(len(line) - len(line.lstrip()) for line in lines)
    arguments: dict[str, str] = {}
    name = ""
    for line in lines:
        found = _ARGUMENT.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if found:
            name = found[1]
            arguments[name] = found[2].strip()
        elif name:
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return description, arguments


def _schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type hint. Raise TypeError for one that has none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(_JSON_TYPES.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _union_schema(inner)
    if origin is Literal:
        kinds = list(dict.fromkeys(_JSON_TYPES[type(value)]["type"] for value in inner))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema_of(inner[0])}
    if origin is tuple:
        if len(inner) == 1 or ... in inner:
            raise TypeError(f"{hint} has no JSON schema; use list[...]")
        return {"type": "array", "prefixItems": [_schema_of(part) for part in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(inner[1])}
    raise TypeError(f"the type hint {hint} has no JSON schema; use plain types such as list[str]")


def _union_schema(members: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_schema_of(member) for member in members if member is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} for each in schemas):
        names = sorted({each["type"] for each in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, "nullable": True} if type(None) in members else schema
