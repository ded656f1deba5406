r"""Evaluate arithmetic of rational numbers exactly, without computer algebra.

``2^{10}`` and ``3\cdot(4-\frac{1}{2})`` examples. Whatever is not plain, such as
roots, letters and factorials, is left to the worker. So is ``1/2(3)``, which can be read in two ways.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hacrl.tasks.math.numbers import parse_number

MAX_LENGTH = 200  # characters
MAX_BITS = 20_000  # of a power's numerator or denominator

_TOKEN = re.compile(r"\\frac|\\cdot|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|[-+/^(){}]")


class _NotPlain(Exception):  # noqa: N818 - control flow, not an error
    """The text is not plain arithmetic."""


def rational_value(text: str) -> Fraction | None:
    """Return the value of normalised text; None if the text is not plain arithmetic or divides by zero."""
    if (value := parse_number(text)) is not None:
        return value
    if len(text) > MAX_LENGTH:
        return None
    tokens = _TOKEN.findall(text)
    if sum(map(len, tokens)) != len(text):  # a character that no token covers
        return None
    reader = _Reader(tokens)
    try:
        value = reader.read_sum()
    except (_NotPlain, ZeroDivisionError):
        return None
    return value if reader.at == len(tokens) else None


class _Reader:
    """Reads tokens by recursive descent; normalisation bounds the depth of brackets."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if expected and token not in expected:
            raise _NotPlain
        self.at += 1
        return token

    def read_sum(self) -> Fraction:
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("-", "+"):
            self.take()
        value = sign * self.read_product()
        while self.peek() in ("+", "-"):
            value += (1 if self.take() == "+" else -1) * self.read_product()
        return value

    def read_product(self) -> Fraction:
        value = self.read_power()
        divided = False
        while (token := self.peek()) in ("\\cdot", "/", "(", "\\frac"):
            if token in ("\\cdot", "/"):
                self.take()
            elif divided:  # 1/2(3)
                raise _NotPlain
            factor = self.read_power()
            divided = token == "/"
            value = value / factor if divided else value * factor
        return value

    def read_power(self) -> Fraction:
        value = self.read_operand()
        if self.peek() == "^":
            self.take()
            exponent = self.read_group("{", "}")
            value = _power(value, exponent)
        if self.peek() == "^":
            raise _NotPlain
        return value

    def read_operand(self) -> Fraction:
        token = self.peek()
        if token == "(":
            return self.read_group("(", ")")
        if token == "\\frac":
            self.take()
            return self.read_group("{", "}") / self.read_group("{", "}")
        if not token or not (token[0].isdigit() or token[0] == "."):
            raise _NotPlain
        self.take()
        whole = Fraction(token)
        if self.peek() == "\\frac":  # a mixed number, if whole numbers are above and below
            frac = self.tokens[self.at : self.at + 7]
            if not (token.isdigit() and len(frac) == 7 and frac[2].isdigit() and frac[5].isdigit()):
                raise _NotPlain
            whole += self.read_operand()
        return whole

    def read_group(self, opening: str, closing: str) -> Fraction:
        self.take(opening)
        value = self.read_sum()
        self.take(closing)
        return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power with a whole exponent, if the result is of moderate size."""
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or abs(exponent) * bits > MAX_BITS:
        raise _NotPlain
    return base ** int(exponent)
