"""What a recipe may hold: a bounded amount of plain values. And how such values are shown in errors."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from hacrl.errors import ConfigError

MOST_VALUES = 20_000  # far above any recipe, and little work
DEEPEST = 64  # levels of nesting
_LARGEST = 1024  # bits of a whole number: beyond it there is no float
_LONGEST_LINE = 500  # characters of one line of an error

_short = reprlib.Repr()
_short.maxlevel, _short.maxdict, _short.maxlist, _short.maxtuple = 3, 4, 4, 4
_short.maxstring = _short.maxlong = _short.maxother = 100


def shown(value: Any) -> str:
    """A value as Python writes it, shortened, on one line."""
    try:
        return _short.repr(value)
    except ValueError:  # a number with more digits than Python is willing to write
        return "a number of thousands of digits"


def shown_key(location: Sequence[Any]) -> str:
    """``agents.0.lr``; quoted where a part cannot be printed as it is."""
    parts = [str(part) for part in location]
    return ".".join(part if part.isprintable() and len(part) <= 100 else shown(part) for part in parts)


def one_line(text: str) -> str:
    """Text for one line of an error: what cannot be printed is spelled out, and the end may be missing."""
    text = "".join(
        letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[: _LONGEST_LINE + 1]
    )
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def check_plain(data: Any, source: str) -> None:
    """Refuse what JSON cannot hold, what is nested in itself or endlessly, and what is far too much."""
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
