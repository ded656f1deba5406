r"""Compare two values by computer algebra. Runs in worker processes only.

latex2sympy, the parser of math-verify, parses both values. math-verify's own clean-up is not used: it drops
trailing letters as units (``4t`` becomes 4), primes and the case of variables. Two expressions are equal if
their values agree at some points and math-verify finds them equal.
"""

from __future__ import annotations

import re
from typing import Any

_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?)\^\\circ")
_TRIG = ("\\sin", "\\cos", "\\tan", "\\cot", "\\sec", "\\csc")
_INEQUALITY = re.compile(r"[<>]|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])")
# Notation that the parser misreads: it adds adjacent numbers, drops primes and ignores bases.
_MISREAD = re.compile(r"[0-9.] [0-9]|'|[0-9]_|\\approx|\\sim|\\ldots|\\dots|\\cdots")
_POINTS = ((17, 13), (-29, 31), (101, -77))  # the n-th symbol, by name, becomes (a + n) / b


def equal_values(gold: str, answer: str) -> bool:
    """Return whether two values in normalised LaTeX are equal. An unparsable value equals nothing."""
    if _MISREAD.search(gold) or _MISREAD.search(answer):
        return False
    gold_value, value = _parse(gold), _parse(answer)
    if gold_value is None or value is None:
        return False
    import sympy  # type: ignore[import-untyped,unused-ignore]

    if isinstance(gold_value, sympy.Eq) and isinstance(value, sympy.Eq):
        return _same_equation(gold_value, value)
    if _is_expression(gold_value) and _is_expression(value):
        return _agree_at_points(gold_value, value) and _verify(gold_value, value)
    return bool(_INEQUALITY.search(gold)) and _verify(gold_value, value)


def _parse(text: str) -> Any:
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped,unused-ignore]

    if any(function in text for function in _TRIG):
        text = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", text)
    text = text.replace("^\\circ", "")  # outside trigonometry, degrees are a unit
    try:
        parsed = latex2sympy(
            text,
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        # The parser reads i as a variable.
        return parsed.xreplace({name: sympy.I for name in parsed.free_symbols if name.name == "i"})
    except (MemoryError, RecursionError):
        raise
    except Exception:  # untrusted text: text that the parser fails on is no answer
        return None


def _verify(gold: Any, answer: Any) -> bool:
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from math_verify import verify  # type: ignore[import-untyped,unused-ignore]

    if verify(gold, answer, timeout_seconds=None):  # the pool enforces the time limit
        return True
    # math-verify compares a single variable by its name only
    return isinstance(gold, sympy.Symbol) and sympy.simplify(gold - answer) == 0


def _is_expression(value: Any) -> bool:
    """Return whether the value is a scalar expression: a number once its symbols have values."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    return isinstance(value, sympy.Expr) and not isinstance(value, sympy.MatrixExpr)


def _agree_at_points(gold: Any, answer: Any) -> bool:
    """Return whether both expressions have equal values at all points where both are defined.

    This finds wrong answers faster than simplifying the difference. It also separates 1e-8 from 2e-8, which
    math-verify rounds to 6 places. Exact expressions must agree to 20 digits, decimals to 6 significant
    digits. Points of both signs separate x from its absolute value.
    """
    import sympy  # type: ignore[import-untyped,unused-ignore]

    has_decimal = bool(gold.atoms(sympy.Float) or answer.atoms(sympy.Float))
    tolerance = 1e-6 if has_decimal else 1e-20
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for numerator, denominator in _POINTS if names else _POINTS[:1]:
        point = {name: sympy.Rational(numerator + n, denominator) for n, name in enumerate(names)}
        values = [sympy.N(side.subs(point).doit(), 30) for side in (gold, answer)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        difference, size = abs(values[0] - values[1]), max(abs(value) for value in values)
        if not all(_has_no_digits(value) for value in values) and not bool(difference <= tolerance * size):
            return False
    return True


def _has_no_digits(value: Any) -> bool:
    """Return whether no digit of the value is certain, which in sympy means that it is probably zero."""
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in value.as_real_imag())


def _same_equation(gold_equation: Any, equation: Any) -> bool:
    """Return whether the equations' differences of sides are constant multiples of each other."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    gold, answer = gold_equation.lhs - gold_equation.rhs, equation.lhs - equation.rhs
    if gold.free_symbols != answer.free_symbols or not gold.free_symbols:
        return False
    ratio = sympy.simplify(gold / answer)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)
