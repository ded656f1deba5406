"""Turn validation errors into sentences that name the key, the problem and the fix."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hacrl.config.method import method_names, method_settings
from hacrl.config.method_base import MethodSettings
from hacrl.config.schema import RunConfig
from hacrl.config.trl_names import config_answer
from hacrl.config.values import one_line, shown, shown_key

_MOST_PROBLEMS = 10  # shown at once
_UNKNOWN_KEY = {"unexpected_keyword_argument", "extra_forbidden"}
_MUST_BE = {  # pydantic's words are JSON's; a recipe is YAML or Python
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys to values",
    "dataclass_type": "a mapping of keys to values",
}


def explain(error: ValidationError, data: dict[str, Any]) -> Iterator[str]:
    """Yield one line per problem: the key, what is wrong with its value, and the fix."""
    problems = error.errors(include_url=False)
    for problem in problems[:_MOST_PROBLEMS]:
        yield f"  {one_line(_sentence(problem, data))}"
    if len(problems) > _MOST_PROBLEMS:
        yield f"  and {len(problems) - _MOST_PROBLEMS:,} more"


def _sentence(problem: ErrorDetails, data: dict[str, Any]) -> str:
    location = _without_union_tags(problem["loc"])
    key = shown_key(location)
    if problem["type"] in _UNKNOWN_KEY:
        return f"{key}: unknown key{_suggestion(location, data)}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key}: missing"
    if problem["type"] in ("union_tag_not_found", "union_tag_invalid"):
        names = method_names()
        given = problem["input"].get("name")
        near = get_close_matches(str(given), names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else " (your own: module:attribute)"
        return f"{key}.name: must be one of {', '.join(names)}, not {shown(given)}{hint}"
    if problem["type"] == "value_error":  # a check in __post_init__, whose message names the key
        prefix = f"{key}: " if key else ""
        return f"{prefix}{problem['ctx']['error']}"
    kind = _MUST_BE.get(problem["type"])
    wanted = f"must be {kind}" if kind else problem["msg"].replace("Input should be", "must be")
    return f"{key}: {wanted[0].lower()}{wanted[1:]}, not {shown(problem['input'])}"


def _without_union_tags(location: Sequence[str | int]) -> list[str | int]:
    """Drop the method's name, which pydantic puts into the location: a recipe has no such level."""
    if len(location) > 1 and location[0] == "method":
        return [location[0], *location[2:]]
    return list(location)


def _suggestion(location: Sequence[str | int], data: dict[str, Any]) -> str:
    if (answer := config_answer(str(location[-1]))) is not None:
        return f"; {answer}"
    known = sorted(_known_keys(location[:-1], data))
    near = get_close_matches(str(location[-1]), known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _known_keys(parents: Sequence[str | int], data: dict[str, Any]) -> set[str]:
    """Return the field names of the record at a location."""
    record: Any = RunConfig
    for part in parents:
        hints = typing.get_type_hints(record) if dataclasses.is_dataclass(record) else {}
        record = hints.get(str(part), record) if not isinstance(part, int) else record
        record = _record_type(record, data)
    return {field.name for field in dataclasses.fields(record)} if dataclasses.is_dataclass(record) else set()


def _record_type(annotation: Any, data: dict[str, Any]) -> Any:
    """Return the record inside ``tuple[X, ...]``; of a union of methods, the one that the recipe names."""
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0]
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        parts = [part for part in typing.get_args(annotation) if isinstance(part, type)]
        records = [part for part in parts if dataclasses.is_dataclass(part)]
        if len(records) == 1:  # a section that may be left out
            return records[0]
        method = data.get("method")
        if all(issubclass(record, MethodSettings) for record in records):
            return method_settings(method.get("name") if isinstance(method, dict) else None)
    return annotation
