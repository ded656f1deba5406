r"""Part a unit from a value: ``12 \text{ cm}^2``, ``90^\circ``, ``17\%``, ``5 apples``, ``3 million``.

A unit that only one side has is forgiven, as the question usually names it. Two different measures (cm and m,
cm^2 and cm^3) are not. Single letters are variables, never units: ``4t`` is not 4.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hacrl.tasks.math.latex import text_content, untidy

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
_MEASURES = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "dozen": 0}
_TRIG = frozenset(("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"))
# Part of the value, whatever it is compared with.
_KEPT = re.compile(
    r"\b(?:[ap]\.? ?m\.?|st|nd|rd|th|if|for|when|where|mod|base|bc|ad|over|per)\b", re.IGNORECASE
)
_BARE_WORD = re.compile(r"[0-9.,/}]([a-z]{2,24})\.?(\^\{[23]\})?$")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as tidied LaTeX and what it is a quantity of."""

    value: str
    measure: str | None = None  # a known measure with its power, e.g. "cm^2"; None: none, or just a word
    percent: bool = False
    scale: int = 1  # of "million"


def part_unit(tokens: list[str]) -> Quantity:
    """The value without its unit. A unit alone stays what it is."""
    tokens = list(tokens)
    if len(tokens) > 1 and tokens[-1] == "%":
        return Quantity(untidy(tokens[:-1]), percent=True)
    if len(tokens) > 1 and tokens[-1] == "^\\circ" and not _TRIG & set(tokens):
        return Quantity(untidy(tokens[:-1]), measure="deg")
    power, rest = _final_power(tokens)
    words = text_content(rest[-1]) if len(rest) > 1 else None
    if words is None or _KEPT.search(words):
        return _part_bare(untidy(tokens))
    value, measure, scale = untidy(rest[:-1]), _measure(words, power), _scale(words)
    if not any(c.isdigit() for c in value) and "\\pi" not in value:
        return Quantity(untidy(tokens))
    if measure == "percent":
        return Quantity(value, percent=True)
    return Quantity(value, measure=measure, scale=scale)


def measures_agree(one: Quantity, other: Quantity) -> bool:
    """Whether the units do not contradict each other."""
    return one.measure is None or other.measure is None or one.measure == other.measure


def _final_power(tokens: list[str]) -> tuple[int | None, list[str]]:
    if len(tokens) > 4 and tokens[-4:-2] == ["^", "{"] and tokens[-2] in ("2", "3") and tokens[-1] == "}":
        return int(tokens[-2]), tokens[:-4]
    return None, tokens


def _measure(words: str, power: int | None) -> str | None:
    parts = [part.strip(".") for part in words.lower().split()]
    while parts and (parts[0] in _POWERS or parts[0] in _SCALES):
        power = _POWERS.get(parts.pop(0), power)
    unit = _MEASURES.get(" ".join(parts))
    if unit is None:
        return None
    return f"{unit}^{power}" if power else unit


def _scale(words: str) -> int:
    first = words.lower().split()[0].strip(".")
    return 12 if first == "dozen" else 10 ** _SCALES[first] if first in _SCALES else 1


def _part_bare(text: str) -> Quantity:
    r"""A word without ``\text`` after a number: a known measure, or what is no product of letters."""
    found = _BARE_WORD.search(text)
    if not found:
        return Quantity(text)
    word, power = found.group(1), int(found.group(2)[2]) if found.group(2) else None
    for prefix in (*_POWERS, *_SCALES):
        if word.startswith(prefix) and len(word) > len(prefix) + 1:
            word = f"{prefix} {word[len(prefix) :]}"
            break
    measure = _measure(word, power)
    # Variables of a product stand in alphabetical order, words hardly ever do: 6abcd, 6 apples.
    is_word = len(word) >= 4 and bool(set(word) & set("aeiou")) and list(word) != sorted(set(word))
    if (measure is None and not is_word) or _KEPT.search(word):
        return Quantity(text)
    if measure == "percent":
        return Quantity(text[: found.start() + 1], percent=True)
    return Quantity(text[: found.start() + 1], measure=measure, scale=_scale(word))
