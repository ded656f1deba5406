"""Parse plain numbers exactly. Only ASCII digits count: ``int()`` also accepts Arabic and full-width ones."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400  # larger powers of ten are not parsed

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DECIMAL = re.compile(_UNSIGNED)
_SCIENTIFIC = re.compile(rf"({_UNSIGNED})(?:[eE]([+-]?[0-9]{{1,6}})|\\cdot10\^\{{([+-]?[0-9]{{1,6}})\}})")
_E_NOTATION = re.compile(r"([+-]?[0-9]*\.?[0-9]*)[eE]([+-]?[0-9]{1,6})")
_POWER_OF_TEN = re.compile(r"10\^\{([+-]?[0-9]{1,6})\}")
_FRACTION = re.compile(r"([0-9]{0,400} ?)\\frac\{([+-]?[0-9.,]+)\}\{([+-]?[0-9.,]+)\}")
_SLASH = re.compile(r"(?:([0-9]{1,400}) )?([0-9.,]+)/([0-9.,]+)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot(?=\{[0-9]\}))\{([0-9]+)\}")
# A number and what may follow it: a unit, a factor. A further comma, relation or word separates a list.
_THOUSANDS = re.compile(
    r"[+-]?(?:\\\$|[€£])?[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?(?:(?![0-9])[^,;=]*)?"
)
_COMMA_OF_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_CONNECTIVE = re.compile(r"\\(?:land|lor|cup|approx|in)(?![A-Za-z])")


def has_thousands_separators(text: str) -> bool:
    r"""Return whether commas separate thousands: ``1,234`` and ``\$1,234``, not ``1,23``, ``0,123``."""
    return _THOUSANDS.fullmatch(text) is not None and not _CONNECTIVE.search(text)


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of normalised text; None if the text is not a plain number.

    Plain numbers are ``-12``, ``1,234.50``, ``\frac{3}{4}``, ``2\frac{1}{2}``, ``2 1/2``, ``4.5e33``,
    ``4.5\cdot10^{33}`` and ``0.\overline{3}``.
    """
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    sign = -1 if text.startswith("-") else 1
    if text[:1] in ("+", "-"):
        text = text[1:].lstrip(" ")
    value = _parse_unsigned(text)
    return None if value is None else sign * value


def expand_for_parser(text: str) -> str:
    r"""Rewrite ``4.5e33``, ``-1./3`` and ``0.\overline{3}``, which the LaTeX parser misreads."""
    if found := _E_NOTATION.fullmatch(text):
        return f"{found.group(1)}\\cdot10^{{{int(found.group(2))}}}"
    text = _COMMA_OF_THOUSANDS.sub("", text)
    if ("." in text and "/" in text) or text.endswith(".") or _REPEATING.search(text):
        value = parse_number(text)
        if value is not None:
            return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return text


def _parse_unsigned(text: str) -> Fraction | None:
    if (value := _parse_decimal(text)) is not None:
        return value
    if found := _FRACTION.fullmatch(text):
        whole, above, below = found.groups()
        if whole.strip() and (above[0] in "+-" or below[0] in "+-"):
            return None
        return _parse_quotient(above, below, Fraction(int(whole) if whole.strip() else 0))
    if found := _SLASH.fullmatch(text):
        whole, above, below = found.groups()
        return _parse_quotient(above, below, Fraction(int(whole or "0")))
    if found := _SCIENTIFIC.fullmatch(text):
        mantissa = _parse_decimal(found.group(1))
        exponent = int(found.group(2) or found.group(3))
        if mantissa is None or abs(exponent) > MAX_EXPONENT:
            return None
        return mantissa * Fraction(10) ** exponent
    if found := _POWER_OF_TEN.fullmatch(text):
        exponent = int(found.group(1))
        return Fraction(10) ** exponent if abs(exponent) <= MAX_EXPONENT else None
    if found := _REPEATING.fullmatch(text):
        whole, fixed, period = found.groups()
        repeated: Fraction = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(fixed)
        return Fraction(int((whole + fixed) or "0"), 10 ** len(fixed)) + repeated
    return None


def _parse_decimal(text: str) -> Fraction | None:
    """Parse an unsigned integer or decimal; ``1.`` and ``.5`` are valid, a lone dot is not."""
    if not text or text == "." or not _DECIMAL.fullmatch(text):
        return None
    whole, _, part = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int((whole + part) or "0"), 10 ** len(part))


def _parse_quotient(above: str, below: str, whole: Fraction) -> Fraction | None:
    numerator, denominator = _parse_signed(above), _parse_signed(below)
    if numerator is None or not denominator:
        return None
    return whole + numerator / denominator


def _parse_signed(text: str) -> Fraction | None:
    value = _parse_decimal(text.lstrip("+-"))
    if value is None or len(text) - len(text.lstrip("+-")) > 1:
        return None
    return -value if text.startswith("-") else value
