"""Records as plain JSON values: every record that crosses a process, a file or a network.

``to_json`` and ``from_json`` are driven by the records' type annotations. Every value comes back exactly,
with one exception: a float that is not finite is written as null. Null is read back as nan where a float
must be, and as None where None is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import orjson

from hacrl.json_values import is_plain_json

SCHEMA = 1  # version of the records' JSON; increased when older readers cannot read newer records

Record = TypeVar("Record")
_Convert = Callable[[Any], Any]


class RecordError(ValueError):
    """JSON data that is not the expected record."""


def to_json(record: Any) -> dict[str, Any]:
    """Return a record (a dataclass of hacrl) as plain JSON values, without a schema version."""
    data: dict[str, Any] = _writer(cast(Any, type(record)))(record)
    return data


def from_json(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Return the record of this type that :func:`to_json` wrote. Raise RecordError for other data."""
    try:
        record: Record = _reader(cast(Any, kind))(data)
    except RecordError as error:
        raise RecordError(f"{kind.__name__}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:  # e.g. from the checks of the record itself
        raise RecordError(f"{kind.__name__}: {error}") from error
    return record


def to_bytes(record: Any) -> bytes:
    """Return a record as one JSON document with its schema version."""
    return dump_line({"schema": SCHEMA, **to_json(record)})


def from_bytes(kind: type[Record], content: bytes) -> Record:
    """Return the record that :func:`to_bytes` wrote."""
    data = load_line(content)
    check_schema(data)
    del data["schema"]
    return from_json(kind, data)


def dump_line(data: Mapping[str, Any]) -> bytes:
    """Return one line of JSON, without a line break.

    orjson refuses lone surrogates and integers of more than 64 bits; the standard library writes those.
    """
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def load_line(content: bytes) -> dict[str, Any]:
    """Return one JSON object. Raise RecordError if there is none.

    orjson is not used: it would refuse lone surrogates and round large integers.
    """
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RecordError(f"a JSON object was expected, not {type(data).__name__}")
    return data


def check_schema(data: Mapping[str, Any]) -> None:
    """Raise RecordError if the data has another schema version than this program."""
    found = data.get("schema")
    if type(found) is not int or found != SCHEMA:
        raise RecordError(f"its schema is {found!r}, this version of hacrl reads schema {SCHEMA}")


@cache
def _writer(kind: Any) -> _Convert:
    """Return the function that converts values of this type to JSON."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        parts = [(part.name, _writer(hints[part.name])) for part in fields(kind)]
        return lambda value: {name: write(getattr(value, name)) for name, write in parts}
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is float:
        return lambda value: value if math.isfinite(value) else None
    if _is_named_tuple(kind):
        parts = [(name, _writer(hint)) for name, hint in get_type_hints(kind).items()]
        return lambda value: {name: write(getattr(value, name)) for name, write in parts}
    if origin is tuple:
        if arguments[0] is float:
            return _write_floats
        if arguments[0] in (int, bool, str):
            return list
        write_item = _writer(arguments[0])
        return lambda value: [write_item(item) for item in value]
    if origin in (dict, Mapping):
        if arguments[1] is Any:
            return _write_fields
        write_value = _writer(arguments[1])
        return lambda value: {key: write_value(item) for key, item in value.items()}
    if _is_optional(kind):
        write_some = _writer(_without_none(kind))
        return lambda value: None if value is None else write_some(value)
    _check_scalar(kind)
    return _unchanged


@cache
def _reader(kind: Any) -> _Convert:
    """Return the function that converts JSON to values of this type."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        required = {
            part.name for part in fields(kind) if part.default is MISSING and part.default_factory is MISSING
        }
        readers = {part.name: _reader(hints[part.name]) for part in fields(kind)}
        return lambda data: kind(**_read_parts(data, readers, required))  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is float:
        return _read_float
    if _is_named_tuple(kind):
        readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        required = readers.keys() - kind._field_defaults.keys()
        return lambda data: kind(**_read_parts(data, readers, required))
    if origin is tuple:
        read_item = _reader(arguments[0])
        if arguments[0] is float:
            return lambda data: _read_floats(_expect(data, list))
        if arguments[0] in (int, bool, str):
            return lambda data: _read_scalars(_expect(data, list), arguments[0])
        return lambda data: tuple(read_item(item) for item in _expect(data, list))
    if origin in (dict, Mapping):
        if arguments[1] is Any:
            return lambda data: _expect(data, dict)
        read_value = _reader(arguments[1])
        return lambda data: {key: read_value(item) for key, item in _expect(data, dict).items()}
    if _is_optional(kind):
        read_some = _reader(_without_none(kind))
        return lambda data: None if data is None else read_some(data)
    if origin is Literal:
        return lambda data: _read_literal(data, arguments)
    _check_scalar(kind)
    return lambda data: _expect(data, kind)


def _read_parts(data: Any, readers: Mapping[str, _Convert], required: Any) -> dict[str, Any]:
    given = _expect(data, dict)
    if missing := [name for name in required if name not in given]:
        raise RecordError(f"{min(missing)} is missing")
    if unknown := given.keys() - readers.keys():
        raise RecordError(f"{min(unknown)} is unknown")
    parts = {}
    for name, value in given.items():
        try:
            parts[name] = readers[name](value)
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from None
    return parts


def _write_floats(values: tuple[float, ...]) -> list[float | None]:
    if math.isfinite(sum(values)):  # then every value is finite
        return list(values)
    return [value if math.isfinite(value) else None for value in values]


def _write_fields(value: Mapping[str, Any]) -> dict[str, Any]:
    data = dict(value)
    if not is_plain_json(data):
        raise TypeError(f"not plain JSON values: {data!r:.200}")
    return data


def _read_float(data: Any) -> float:
    if data is None:
        return math.nan
    if type(data) is not float and type(data) is not int:
        raise RecordError(f"a number was expected, not {data!r:.40}")
    return float(data)


def _read_floats(data: list[Any]) -> tuple[float, ...]:
    kinds = set(map(type, data))
    return tuple(data) if kinds <= {float} else tuple(map(_read_float, data))


def _read_scalars(data: list[Any], kind: type) -> tuple[Any, ...]:
    for found in set(map(type, data)) - {kind}:
        raise RecordError(f"{kind.__name__} was expected, not {found.__name__}")
    return tuple(data)


def _read_literal(data: Any, allowed: tuple[Any, ...]) -> Any:
    if data not in allowed:
        raise RecordError(f"{data!r:.40} is none of {', '.join(map(repr, allowed))}")
    return data


def _expect(data: Any, kind: Any) -> Any:
    if type(data) is not kind:
        raise RecordError(f"{kind.__name__} was expected, not {type(data).__name__}")
    return data


def _unchanged(value: Any) -> Any:
    return value


def _check_scalar(kind: Any) -> None:
    if kind not in (int, bool, str) and get_origin(kind) is not Literal:
        raise TypeError(f"records of type {kind} have no JSON")


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _without_none(kind: Any) -> Any:
    (some,) = [argument for argument in get_args(kind) if argument is not NoneType]
    return some
