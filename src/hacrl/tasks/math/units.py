r"""Separate a value from its unit: ``12 \text{ cm}^2``, ``90^\circ``, ``17\%``, ``5 apples``, ``3 million``.

A unit may be missing on one side, because the problem usually names it. Two different units (cm and m, cm^2
and cm^3) make answers unequal. Single letters are variables, never units: ``4t`` is not 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hacrl.tasks.math.normalisation import text_content, to_latex

_NAMES = {
    "cm": "cm centimeter centimeters centimetre centimetres",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gm gram grams",
    "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "l": "l liter liters litre litres",
    "ml": "ml milliliter milliliters",
    "s": "s sec secs second seconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "deg": "deg degree degrees",
    "rad": "rad radian radians",
    "cent": "cent cents",
    "dollar": "dollar dollars usd",
    "euro": "euro euros",
    "mph": "mph",
    "kmh": "kmh kph km/h",
    "percent": "percent percentage pct",
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "dozen": 0}
_TRIG = frozenset(("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"))
# Words that are part of the value, not units.
_NOT_UNITS = re.compile(
    r"\b(?:[ap]\.? ?m\.?|st|nd|rd|th|if|for|when|where|mod|base|bc|ad|over|per)\b", re.IGNORECASE
)
_BARE_WORD = re.compile(r"[0-9.,/}]([a-z]{2,24})\.?(\^\{[23]\})?$")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as normalised LaTeX, with its unit."""

    value: str
    unit: str | None = None  # a known unit with its power, e.g. "cm^2"; None: no unit, or an unknown word
    percent: bool = False
    scale: int = 1  # 10**6 for "million"


def split_unit(tokens: list[str]) -> Quantity:
    """Separate the unit from the value. A unit without a value is kept as the value."""
    tokens = list(tokens)
    if len(tokens) > 1 and tokens[-1] == "%":
        return Quantity(to_latex(tokens[:-1]), percent=True)
    if len(tokens) > 1 and tokens[-1] == "^\\circ" and not _TRIG & set(tokens):
        return Quantity(to_latex(tokens[:-1]), unit="deg")
    power, rest = _split_power(tokens)
    words = text_content(rest[-1]) if len(rest) > 1 else None
    if words is None or _NOT_UNITS.search(words):
        return _split_bare_word(to_latex(tokens))
    value, unit, scale = to_latex(rest[:-1]), _parse_unit(words, power), _scale(words)
    if not any(c.isdigit() for c in value) and "\\pi" not in value:
        return Quantity(to_latex(tokens))
    if unit == "percent":
        return Quantity(value, percent=True)
    return Quantity(value, unit=unit, scale=scale)


def units_compatible(first: Quantity, second: Quantity) -> bool:
    """Return whether the units are equal or at least one is missing."""
    return first.unit is None or second.unit is None or first.unit == second.unit


def _split_power(tokens: list[str]) -> tuple[int | None, list[str]]:
    if len(tokens) > 4 and tokens[-4:-2] == ["^", "{"] and tokens[-2] in ("2", "3") and tokens[-1] == "}":
        return int(tokens[-2]), tokens[:-4]
    return None, tokens


def _parse_unit(words: str, power: int | None) -> str | None:
    parts = [part.strip(".") for part in words.lower().split()]
    while parts and (parts[0] in _POWERS or parts[0] in _SCALES):
        power = _POWERS.get(parts.pop(0), power)
    unit = _UNITS.get(" ".join(parts))
    if unit is None:
        return None
    return f"{unit}^{power}" if power else unit


def _scale(words: str) -> int:
    first = words.lower().split()[0].strip(".")
    return 12 if first == "dozen" else 10 ** _SCALES[first] if first in _SCALES else 1


def _split_bare_word(text: str) -> Quantity:
    r"""Separate a word that follows a number without ``\text``: a known unit or an ordinary word.

    Letters that may be a product of variables are no word.
    """
    found = _BARE_WORD.search(text)
    if not found:
        return Quantity(text)
    word, power = found.group(1), int(found.group(2)[2]) if found.group(2) else None
    for prefix in (*_POWERS, *_SCALES):
        if word.startswith(prefix) and len(word) > len(prefix) + 1:
            word = f"{prefix} {word[len(prefix) :]}"
            break
    unit = _parse_unit(word, power)
    # Variables of a product are in alphabetical order, letters of words hardly ever: 6abcd, 6 apples.
    is_word = len(word) >= 4 and bool(set(word) & set("aeiou")) and list(word) != sorted(set(word))
    if (unit is None and not is_word) or _NOT_UNITS.search(word):
        return Quantity(text)
    if unit == "percent":
        return Quantity(text[: found.start() + 1], percent=True)
    return Quantity(text[: found.start() + 1], unit=unit, scale=_scale(word))
