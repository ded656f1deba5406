r"""Separate a value from its unit: ``12 \text{ cm}^2``, ``90^\circ``, ``17\%``, ``\$5``, ``3 million``.

A unit may be missing on one side, because the problem usually names it. Two units that are both written
must measure the same thing, and their scales count: ``5 kJ`` is 5000 J, ``5`` cents are ``\$0.05``. Words
that :mod:`hacrl.tasks.math.vocabulary` does not know stay part of the value. Single letters that are not
set as text are variables: ``4t`` is not 4.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from hacrl.tasks.math.normalisation import text_content, to_latex
from hacrl.tasks.math.vocabulary import (
    PERCENT,
    POWERS,
    Unit,
    compound,
    could_be_counted,
    find_scale,
    find_unit,
    is_adjective,
    is_bare_word,
)

CURRENCIES = {"\\$": "dollar", "€": "euro", "£": "sterling", "\\pounds": "sterling", "\\euro": "euro"}
_TEMPERATURES = {"C": "celsius", "F": "fahrenheit"}
_TRIG = frozenset(("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc"))
_DEGREES_OF = re.compile(r"degrees? (celsius|fahrenheit)", re.IGNORECASE)
_POWER = re.compile("-?[0-9]")

Dimensions = tuple[tuple[str, int], ...]  # base units with their powers, sorted


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value as normalised LaTeX, with its unit."""

    value: str
    unit: Dimensions | None = None  # None: no unit is written; empty: the units cancel out
    factor: Fraction = Fraction(1)  # how many base units one of the unit is
    scale: Fraction = Fraction(1)  # 10**6 for "million"
    percent: bool = False


def split_unit(tokens: Sequence[str], trusted: bool = False) -> Quantity:
    r"""Separate the unit from the value. A unit without a value, or an unknown word, stays in the value.

    ``trusted`` is for gold answers: adjectives and one unknown plural (``14\text{ right triangles}``) count
    things, too.
    """
    tokens, currency = _split_currency(tokens)
    value, suffix = _split_suffix(tokens)
    whole = Quantity(to_latex(tokens), None if currency is None else ((currency, 1),))
    has_words = any(text_content(token) is not None for token in value)
    unit = None if has_words or not _is_value(value) else _UnitReader(suffix, trusted).read()
    if unit is None:
        return whole
    dimensions = unit.dimensions()
    if currency is not None:
        powers = dict(dimensions)
        if unit.percent or (powers.get(currency, 0) > 0 and unit.factor != 1):  # "$5 cents"
            return whole
        if any(power > 0 for base, power in dimensions if base != currency):  # "$5 K" is not in kelvins
            return whole
        dimensions = tuple(sorted({**powers, currency: max(1, powers.get(currency, 0))}.items()))
    written = dimensions if unit.powers or currency is not None else None
    return Quantity(to_latex(value), written, unit.factor, unit.scale, unit.percent)


def units_compatible(first: Quantity, second: Quantity) -> bool:
    """Return whether both units measure the same thing, or at least one is missing.

    A value with π and without a unit is an angle in radians, so degrees must not be missing there.
    """
    if first.unit is not None and second.unit is not None:
        return first.unit == second.unit
    written, other = (second, first) if first.unit is None else (first, second)
    if written.unit is not None and other.percent:
        return False
    return written.unit != (("deg", 1),) or "\\pi" not in written.value


def _is_value(tokens: Sequence[str]) -> bool:
    """Return whether tokens have a digit or π, so that what follows them can be a unit."""
    return any(token.isdigit() or token == "\\pi" for token in tokens)


def _split_currency(tokens: Sequence[str]) -> tuple[list[str], str | None]:
    """Take one currency sign from the front, before or after the number's sign, or from the end."""
    tokens = list(tokens)
    at = 1 if tokens[:1] in (["-"], ["+"]) else 0
    if len(tokens) > at + 1 and tokens[at] in CURRENCIES:
        return tokens[:at] + tokens[at + 1 :], CURRENCIES[tokens[at]]
    if len(tokens) > 1 and tokens[-1] in CURRENCIES:
        return tokens[:-1], CURRENCIES[tokens[-1]]
    return tokens, None


def _split_suffix(tokens: list[str]) -> tuple[list[str], list[str]]:
    r"""Split before the longest run at the end that may be a unit; bare letters become ``\text{...}``."""
    if len(tokens) > 1 and tokens[-1] == "%":
        return tokens[:-1], ["\\text{percent}"]
    if len(tokens) > 2 and tokens[-2] == "^\\circ":
        letter = text_content(tokens[-1]) or tokens[-1]
        if letter in _TEMPERATURES:
            return tokens[:-2], [f"\\text{{{_TEMPERATURES[letter]}}}"]
    if len(tokens) > 1 and tokens[-1] == "^\\circ" != tokens[-2] and not _TRIG & set(tokens):
        return tokens[:-1], ["\\text{deg}"]
    if "\\text" in (token[:5] for token in tokens):
        start = len(tokens)
        for at in range(len(tokens) - 1, 0, -1):
            if text_content(tokens[at]) is not None:
                start = at
            elif tokens[at] not in ("^", "{", "}", "-", "/", "\\cdot", "2", "3", "1", "\\mu", "(", ")"):
                break
        if start < len(tokens):
            if tokens[start - 1] == "\\mu":
                start -= 1
            if tokens[start - 1] == "^\\circ":  # 25 degrees of something
                return tokens, []
            if tokens[start - 1] == "\\cdot":
                return tokens[: start - 1], tokens[start:]
            return tokens[:start], tokens[start:]
    return _split_bare_word(tokens)


def _split_bare_word(tokens: list[str]) -> tuple[list[str], list[str]]:
    r"""Split before letters that follow a number without ``\text`` and are a known word, not variables."""
    power: list[str] = []
    rest = tokens
    if len(tokens) > 5 and tokens[-4:-2] == ["^", "{"] and tokens[-2] in ("2", "3") and tokens[-1] == "}":
        rest, power = tokens[:-4], tokens[-4:]
    start = len(rest)
    while start > 0 and len(rest[start - 1]) == 1 and (rest[start - 1].isalpha() or rest[start - 1] == "/"):
        start -= 1
    if start == len(rest) or start == 0 or not (rest[start - 1].isdigit() or rest[start - 1] in (".", "}")):
        return tokens, []
    words = "".join(rest[start:]).split("/")
    if not all(is_bare_word(word) or (at and find_unit(word)) for at, word in enumerate(words)):
        return tokens, []
    suffix = [part for word in words for part in ("/", f"\\text{{{word}}}")][1:]
    return rest[:start], suffix + power


class _UnitReader:
    """Reads the tokens after a value: a product and quotient of units, after words that multiply."""

    def __init__(self, tokens: Sequence[str], trusted: bool) -> None:
        self.trusted = trusted
        self.powers: Counter[str] = Counter()
        self.factor = Fraction(1)
        self.scale = Fraction(1)
        self.percent = False
        self.words = self._words_of(tokens)

    def read(self) -> _UnitReader | None:
        """Return self; None if a word or sign is unknown."""
        if self.words is None:
            return None
        below, power_before, previous = False, 1, None
        for at, word in enumerate(self.words):
            if word in ("per", "/", "a", "an", "each"):
                if below or previous is None or at + 1 == len(self.words):
                    return None
                below = True
            elif word in ("of", "\\cdot"):
                if previous is None or at + 1 == len(self.words):
                    return None
            elif word.startswith("^"):
                power = int(word[1:])
                if previous is None or power == 0:
                    return None
                self._multiply(previous, (power - 1) * (-1 if below else 1))
            elif word.lower() in POWERS and (word.lower() in ("squared", "cubed")) == (previous is not None):
                power = POWERS[word.lower()]
                if previous is not None and previous.is_counted:  # 5 apples squared
                    return None
                if previous is not None:
                    self._multiply(previous, (power - 1) * (-1 if below else 1))
                else:
                    power_before = power
            elif previous is None and power_before == 1 and (scale := find_scale(word)) is not None:
                self.scale *= scale
            elif word.lower() in PERCENT and len(self.words) == 1:
                self.percent = True
            elif (unit := self._find(word)) is not None and (power_before == 1 or not unit.is_counted):
                self._multiply(unit, power_before * (-1 if below else 1))
                previous, power_before = unit, 1
            elif at + 1 == len(self.words) and self.words[at - 1] == "of" and is_adjective(word):
                pass  # cups of tea: the substance changes neither number nor unit
            elif not (self.trusted and previous is None and at + 1 < len(self.words) and is_adjective(word)):
                return None
        return self if power_before == 1 else None

    def dimensions(self) -> Dimensions:
        """Return the base units that did not cancel."""
        return tuple(sorted((base, power) for base, power in self.powers.items() if power))

    def _multiply(self, unit: Unit, power: int) -> None:
        self.powers[unit.base] += power
        self.factor *= unit.factor**power

    def _find(self, word: str) -> Unit | None:
        if (unit := find_unit(word)) is not None:
            return unit
        if self.trusted and self.words and word == self.words[-1] and could_be_counted(word):
            return Unit(f"count of {word}", is_counted=True)
        return None

    def _words_of(self, tokens: Sequence[str]) -> list[str] | None:
        """Return words, signs, and powers as ``^2``; None for anything else."""
        words: list[str] = []
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if (content := text_content(token)) is not None:
                for word in _DEGREES_OF.sub(r"\1", content).split():
                    word = compound(word.strip("."))
                    words += ["cm", "^3"] if word == "cm^3" else word.replace("/", " / ").split()
            elif token == "^":
                end = at
                while end < len(tokens) and tokens[end] != "}":
                    end += 1
                power = "".join(tokens[at + 2 : end])
                if not _POWER.fullmatch(power):
                    return None
                words.append(f"^{int(power)}")
                at = end
            elif token in ("/", "\\cdot"):
                words.append(token)
            elif token == "\\mu" and at + 1 < len(tokens) and (after := text_content(tokens[at + 1])):
                words.append("\\mu" + after.strip())
                at += 1
            else:
                return None
            at += 1
        return words
