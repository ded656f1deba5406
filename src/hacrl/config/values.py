"""Check that a recipe holds a bounded number of plain values, and show such values in error messages."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from hacrl.errors import ConfigError

MOST_VALUES = 20_000  # of a recipe: far more than any has, and quick to check
DEEPEST = 64  # levels of nesting
_LARGEST = 1024  # bits of a whole number: a larger one has no float
_LONGEST_LINE = 500  # characters of one line of an error

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple = 3, 4, 4, 4
_short.maxstring = _short.maxlong = _short.maxother = 100


def shown(value: Any) -> str:
    """Return a value as Python writes it, shortened, on one line."""
    try:
        return _short.repr(value)
    except ValueError:  # Python refuses to write a number with so many digits
        return "a number of thousands of digits"


def shown_key(location: Sequence[Any]) -> str:
    """Return a dotted key such as ``agents.0.lr``; parts that cannot be printed are quoted."""
    parts = [str(part) for part in location]
    return ".".join(part if part.isprintable() and len(part) <= 100 else shown(part) for part in parts)


def one_line(text: str) -> str:
    """Return a text for one line of an error: unprintable characters are escaped, a long text is cut."""
    text = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: _LONGEST_LINE + 1]
    )
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def check_plain(data: Any, source: str) -> None:
    """Raise ConfigError for values that JSON cannot hold, for too many, and for too deep nesting."""
    left: list[tuple[list[Any], Any]] = [([], data)]
    seen = 0
    while left:
        location, value = left.pop()
        seen += 1
        if seen > MOST_VALUES:
            raise ConfigError(f"{source}: more than {MOST_VALUES:,} values: this is not a recipe")
        if len(location) > DEEPEST:
            key = shown_key(location[:3])
            raise ConfigError(f"{source}: {key}...: nested more than {DEEPEST} levels deep, or in itself")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    where = shown_key([*location, ""])
                    raise ConfigError(f"{source}: {where}{shown(key)}: a key must be text")
                _check_scalar(key, [*location, key], source)
            left += [([*location, key], part) for key, part in reversed(value.items())]
        elif isinstance(value, list | tuple):
            left += [([*location, i], part) for i, part in reversed(list(enumerate(value)))]
        else:
            _check_scalar(value, location, source)


def _check_scalar(value: Any, location: Sequence[Any], source: str) -> None:
    wrong = ""
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            wrong = "text with half a character"
    elif isinstance(value, float):
        wrong = "" if math.isfinite(value) else shown(value)
    elif isinstance(value, int):
        wrong = "" if value.bit_length() <= _LARGEST else "a number of hundreds of digits"
    elif value is not None:
        wrong = type(value).__name__
    if wrong:
        raise ConfigError(
            f"{source}: {shown_key(location)}: only plain, finite values are allowed, not {wrong}"
        )
