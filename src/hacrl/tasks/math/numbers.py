"""Read plain numbers exactly. ASCII digits only: int() would take Arabic or full-width ones in silence."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400  # beyond it a power of ten is not written out

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)?(?:\.[0-9]*)?"
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DECIMAL = re.compile(_UNSIGNED)
_SCIENTIFIC = re.compile(rf"({_UNSIGNED})(?:[eE]([+-]?[0-9]{{1,6}})|\\cdot10\^\{{([+-]?[0-9]{{1,6}})\}})")
_E_NOTATION = re.compile(r"([+-]?[0-9]*\.?[0-9]*)[eE]([+-]?[0-9]{1,6})")
_POWER_OF_TEN = re.compile(r"10\^\{([+-]?[0-9]{1,6})\}")
_FRACTION = re.compile(r"([0-9]{0,4} ?)\\frac\{([+-]?[0-9.,]+)\}\{([+-]?[0-9.,]+)\}")
_SLASH = re.compile(r"([0-9.,]+)/([0-9.,]+)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\overline\{([0-9]+)\}")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def is_grouped(text: str) -> bool:
    """Whether commas in the text part thousands: ``1,234`` does, ``1,23`` and ``0,123`` do not."""
    return _THOUSANDS.fullmatch(text) is not None and not text.lstrip("+-").startswith("0")


def read_number(text: str) -> Fraction | None:
    r"""The exact value of tidied text such as ``-12``, ``1,234.50``, ``\frac{3}{4}``, ``2\frac{1}{2}``,
    ``4.5e33``, ``4.5\cdot10^{33}`` or ``0.\overline{3}``; None if it is anything else.
    """
    if _INTEGER.fullmatch(text):
        return Fraction(int(text))
    sign = -1 if text.startswith("-") else 1
    if text[:1] in ("+", "-"):
        text = text[1:].lstrip(" ")
    value = _read_unsigned(text)
    return None if value is None else sign * value


def spell_out(text: str) -> str:
    r"""``4.5e33``, ``-1./3`` and ``0.\overline{3}``, which the LaTeX parser misreads, in what it reads."""
    if found := _E_NOTATION.fullmatch(text):
        return f"{found.group(1)}\\cdot10^{{{int(found.group(2))}}}"
    if ("." in text and "/" in text) or text.endswith(".") or "overline" in text:
        value = read_number(text)
        if value is not None:
            return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return text


def _read_unsigned(text: str) -> Fraction | None:
    if (value := _decimal(text)) is not None:
        return value
    if found := _FRACTION.fullmatch(text):
        whole, above, below = found.groups()
        if whole.strip() and (above[0] in "+-" or below[0] in "+-"):
            return None
        return _quotient(above, below, Fraction(int(whole) if whole.strip() else 0))
    if found := _SLASH.fullmatch(text):
        return _quotient(found.group(1), found.group(2), Fraction(0))
    if found := _SCIENTIFIC.fullmatch(text):
        mantissa = _decimal(found.group(1))
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


def _decimal(text: str) -> Fraction | None:
    """An unsigned integer or decimal; ``1.`` and ``.5`` are fine, a lone dot is not."""
    if not text or text == "." or not _DECIMAL.fullmatch(text):
        return None
    whole, _, part = text.replace(",", "").replace(" ", "").partition(".")
    return Fraction(int((whole + part) or "0"), 10 ** len(part))


def _quotient(above: str, below: str, whole: Fraction) -> Fraction | None:
    numerator, denominator = _signed(above), _signed(below)
    if numerator is None or not denominator:
        return None
    return whole + numerator / denominator


def _signed(text: str) -> Fraction | None:
    value = _decimal(text.lstrip("+-"))
    if value is None or len(text) - len(text.lstrip("+-")) > 1:
        return None
    return -value if text.startswith("-") else value
