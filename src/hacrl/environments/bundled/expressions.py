"""Compute the value of an arithmetic expression exactly. No text is ever evaluated as code."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters
MOST_DIGITS = 60  # of a result, before or after the decimal point of its fraction
SHOWN_DIGITS = 10  # significant digits of a result that is no whole number
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CHARACTERS = re.compile(r"[-0-9.eE+*/%()\s]+")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "$": " "})
_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
    """A text is no expression, or its value cannot be computed; the message says why."""


def calculate(text: str) -> str:
    """Return the value of an expression as a decimal number: ``calculate("(3 + 5) / 4") == "2"``.

    Known are numbers, ``+ - * / // % **`` or ``^``, and parentheses. Results that are no whole numbers have
    10 significant digits. Raise ExpressionError for anything else.
    """
    return as_decimal(value_of(text))


def value_of(text: str) -> Fraction:
    """Return the exact value of an expression. Raise ExpressionError if it has none."""
    if len(text) > LONGEST:
        raise ExpressionError(f"the expression is longer than {LONGEST} characters")
    cleaned = _THOUSANDS.sub("", text.translate(_SIGNS)).replace("^", "**").strip()
    if not _CHARACTERS.fullmatch(cleaned):
        raise ExpressionError("only numbers, + - * / // % ** and parentheses are known")
    try:
        tree = ast.parse(cleaned, mode="eval")
        return _checked(_value(tree.body))
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{text.strip()[:60]!r} is not an arithmetic expression") from None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _checked(_literal(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return value if isinstance(node.op, ast.UAdd) else -value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _checked(_OPERATORS[type(node.op)](left, right))
    raise ExpressionError("only numbers, + - * / // % ** and parentheses are known")


def _literal(node: ast.Constant) -> Fraction:
    """Return a number as it is written: 0.1 is one tenth."""
    value = node.value
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ExpressionError("the number is too large")
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("an exponent must be a whole number")
    power = int(exponent)
    digits = max(len(str(abs(base.numerator))), len(str(base.denominator)))
    if abs(power) > 1 and digits * abs(power) > 4 * MOST_DIGITS and abs(base) != 1:
        raise ExpressionError("the result is too large")
    return _checked(base**power)


def _checked(value: Fraction) -> Fraction:
    if abs(value.numerator) >= 10**MOST_DIGITS or value.denominator >= 10**MOST_DIGITS:
        raise ExpressionError("the result is too large")
    return value


def as_decimal(value: Fraction) -> str:
    """Return a number in decimal notation: whole numbers in full, others with 10 significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{value.numerator / value.denominator:.{SHOWN_DIGITS}g}"
