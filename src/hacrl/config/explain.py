"""Turn validation errors into sentences that name the key, the problem and the fix."""

from __future__ import annotations

import dataclasses
import re
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
    groups = _by_value(error.errors(include_url=False))
    for problems in groups[:_MOST_PROBLEMS]:
        yield f"  {one_line(_sentence(problems, data))}"
    if len(groups) > _MOST_PROBLEMS:
        yield f"  and {len(groups) - _MOST_PROBLEMS:,} more"


def _by_value(problems: Sequence[ErrorDetails]) -> list[list[ErrorDetails]]:
    """Group the problems of one value: one that may be text or a list has a problem as each of them.

    A list with a wrong entry has a problem as text, too; the entry's alone is kept.
    """
    groups: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for problem in problems:
        groups.setdefault(tuple(_location(problem)), []).append(problem)
    return [
        group
        for location, group in groups.items()
        if not _is_union_member(group[0]["loc"][-1:])
        or not any(other[: len(location)] == location for other in groups if other != location)
    ]


def _sentence(problems: Sequence[ErrorDetails], data: dict[str, Any]) -> str:
    problem = problems[0]
    location = _location(problem)
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
    kinds = [_MUST_BE.get(one["type"]) or one["msg"].removeprefix("Input should be ") for one in problems]
    wanted = " or ".join(dict.fromkeys(kinds))
    sentence = wanted if problem["msg"] in kinds else f"must be {wanted}"
    return f"{key}: {sentence[0].lower()}{sentence[1:]}, not {shown(problem['input'])}"


def _location(problem: ErrorDetails) -> list[str | int]:
    """Return where the problem is in a recipe: without what pydantic puts into its location.

    That is the method's name, and the kind of a value that may be of several kinds. An unknown key stays,
    whatever its name.
    """
    location = list(problem["loc"])
    if len(location) > 1 and location[0] == "method":
        del location[1]
    *parents, last = location or [""]
    kept = [part for part in parents if not _is_union_member([part])]
    if location and (problem["type"] in _UNKNOWN_KEY or not _is_union_member([last])):
        kept.append(last)
    return kept


def _is_union_member(part: Sequence[str | int]) -> bool:
    """Return whether the part of a location names a kind of value, such as ``tuple[str, ...]``."""
    return bool(part) and re.fullmatch(r"str|int|float|bool|\w+\[.*\]", str(part[0])) is not None


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
