"""Plain JSON values, and Python values written as plain JSON so that they can be read back exactly."""

from __future__ import annotations

import math
from typing import Any

_TAG = "__python__"  # marks an object that stands for a value JSON does not have
_SEQUENCES = {"tuple": tuple, "set": set, "frozenset": frozenset}


def is_plain_json(value: Any) -> bool:
    """Return whether JSON holds this value exactly: a tuple would come back as a list, nan as nothing."""
    kind = type(value)
    if value is None or kind in (str, bool, int):
        return True
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(map(is_plain_json, value))
    return kind is dict and all(type(key) is str and is_plain_json(item) for key, item in value.items())


def to_tagged_json(value: Any) -> Any:
    """Return plain JSON from which :func:`from_tagged_json` makes an equal value of the same type.

    Knows tuples, sets, mappings with any keys and non-finite floats. Subclasses of text, such as numpy's,
    become plain text. Raise TypeError for any other type.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {_TAG: "float", "value": repr(value)}
    if kind is list:
        return [to_tagged_json(item) for item in value]
    if kind in _SEQUENCES.values():
        return {_TAG: kind.__name__, "value": [to_tagged_json(item) for item in value]}
    if kind is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: to_tagged_json(item) for key, item in value.items()}
        pairs = [[to_tagged_json(key), to_tagged_json(item)] for key, item in value.items()]
        return {_TAG: "dict", "value": pairs}
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} cannot be written as JSON")


def from_tagged_json(value: Any) -> Any:
    """Return the value that :func:`to_tagged_json` wrote."""
    if isinstance(value, list):
        return [from_tagged_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: from_tagged_json(item) for key, item in value.items()}
    kind, content = value[_TAG], value["value"]
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {from_tagged_json(key): from_tagged_json(item) for key, item in content}
    return _SEQUENCES[kind](from_tagged_json(item) for item in content)
