r"""Compare two values by computer algebra. Runs in worker processes only.

Parsing is latex2sympy's (the parser of math-verify) without math-verify's own clean-up, which drops trailing
letters it takes for units (``4t`` became 4), primes and the case of variables. Expressions have to agree in
their values at some points, and math-verify has to find them equal.
"""

from __future__ import annotations

import re
from typing import Any

_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\^\\circ")
_TRIG = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
_BOUND = re.compile(r"[<>]|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])")
# Notation that the parser reads as something else: adjacent numbers are added, primes dropped, bases ignored.
_MISREAD = re.compile(r"[0-9.] [0-9]|'|[0-9]_|\\approx|\\sim|\\ldots|\\dots|\\cdots")
_POINTS = ((17, 13), (-29, 31), (101, -77))  # the n-th symbol, by name, becomes (a + n) / b


def equal_values(gold: str, answer: str) -> bool:
    """Whether two values in tidied LaTeX are equal. What cannot be parsed equals nothing."""
    if _MISREAD.search(gold) or _MISREAD.search(answer):
        return False
    one, other = _parse(gold), _parse(answer)
    if one is None or other is None:
        return False
    import sympy  # type: ignore[import-untyped,unused-ignore]

    if isinstance(one, sympy.Eq) and isinstance(other, sympy.Eq):
        return _same_equation(one, other)
    if _is_expression(one) and _is_expression(other):
        return _may_be_equal(one, other) and _verify(one, other)
    return bool(_BOUND.search(gold)) and _verify(one, other)


def _parse(text: str) -> Any:
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped,unused-ignore]

    if any(function in text for function in _TRIG):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.replace("^\\circ", "")  # elsewhere a unit like others
    try:
        parsed = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # The parser takes i for a variable like any other.
        return parsed.xreplace({name: sympy.I for name in parsed.free_symbols if name.name == "i"})
    except (MemoryError, RecursionError):
        raise
    except Exception:  # untrusted text: whatever the parser trips over is no answer
        return None


def _verify(gold: Any, answer: Any) -> bool:
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from math_verify import verify  # type: ignore[import-untyped,unused-ignore]

    if verify(gold, answer, timeout_seconds=None):  # the pool kills what takes too long
        return True
    # math-verify compares a single variable with anything by its name only
    return isinstance(gold, sympy.Symbol) and sympy.simplify(gold - answer) == 0


def _is_expression(value: Any) -> bool:
    """An expression that has a number for a value once its symbols have."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _may_be_equal(one: Any, other: Any) -> bool:
    """Whether both have the same values at some points, as far as they have values there.

    A wrong answer is found out sooner than by simplifying the difference; and math-verify rounds decimals to
    6 places, so that it takes 1e-8 for 2e-8. Exact expressions must agree to 20 digits, and where a decimal
    stands for an exact number, to 6 significant ones. Points of both signs tell x from its absolute value.
    """
    import sympy  # type: ignore[import-untyped,unused-ignore]

    has_decimal = bool(one.atoms(sympy.Float) or other.atoms(sympy.Float))
    tolerance = 1e-6 if has_decimal else 1e-20
    names = sorted(one.free_symbols | other.free_symbols, key=str)
    for above, below in _POINTS if names else _POINTS[:1]:
        point = {name: sympy.Rational(above + n, below) for n, name in enumerate(names)}
        values = [sympy.N(side.subs(point).doit(), 30) for side in (one, other)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        difference, size = abs(values[0] - values[1]), max(abs(value) for value in values)
        if not all(_is_lost(value) for value in values) and not bool(difference <= tolerance * size):
            return False
    return True


def _is_lost(value: Any) -> bool:
    """Whether no digit of the value is certain: sympy's way of saying that it is probably zero."""
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in value.as_real_imag())


def _same_equation(one: Any, other: Any) -> bool:
    """Two equations say the same if their differences of sides are a constant multiple of each other."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    gold, answer = one.lhs - one.rhs, other.lhs - other.rhs
    if gold.free_symbols != answer.free_symbols or not gold.free_symbols:
        return False
    ratio = sympy.simplify(gold / answer)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)
