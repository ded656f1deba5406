r"""Compare two values by computer algebra. Runs in worker processes only.

latex2sympy, the parser of math-verify, parses both values. math-verify's own clean-up is not used: it drops
trailing letters as units (``4t`` becomes 4), primes and the case of variables. Two expressions are equal if
their values agree at some points and math-verify finds them equal.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from hacrl.tasks.math.parser_input import parser_input

_INEQUALITY = re.compile(r"[<>]|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])")
_TOLERANCE = 10**-50
_POINTS = ((17, 13), (-29, 31), (101, -77))  # the n-th symbol, by name, becomes (a + n) / b


def equal_values(gold: str, answer: str) -> bool:
    """Return whether two values in normalised LaTeX are equal. An unparsable value equals nothing."""
    value = _parse(answer)
    gold_value = None if value is None else _parse_gold(gold)
    if gold_value is None or value is None:
        return False
    import sympy  # type: ignore[import-untyped,unused-ignore]

    if isinstance(gold_value, sympy.Eq) and isinstance(value, sympy.Eq):
        return _same_equation(gold_value, value)
    if _is_expression(gold_value) and _is_expression(value):
        agree = _agree_at_points(gold_value, value)
        if agree is None:  # nowhere a number, such as f(x)
            return bool(sympy.simplify(gold_value - value) == 0)
        if agree:
            return _verify(gold_value, value)
        return "." in answer and _is_rounded(gold_value, value)
    if not _INEQUALITY.search(gold) or _is_solved(gold_value) != _is_solved(value):
        return False
    return _verify(gold_value, value)


@lru_cache(maxsize=1024)  # a step verifies many responses to few problems
def _parse_gold(text: str) -> Any:
    return _parse(text)


def _parse(text: str) -> Any:
    import sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped,unused-ignore]
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig  # type: ignore[import-untyped,unused-ignore]

    prepared = parser_input(text)
    if prepared is None:
        return None
    try:
        parsed = latex2sympy(
            prepared,
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


def _agree_at_points(gold: Any, answer: Any) -> bool | None:
    """Return whether both expressions have equal values, to 50 digits, at the points where both are defined.

    None if both are defined at no point. False if one is infinite everywhere.

    This finds wrong answers faster than simplifying the difference. It also separates 1e-8 from 2e-8, which
    math-verify rounds to 6 places. Points of both signs separate x from its absolute value.
    """
    import sympy  # type: ignore[import-untyped,unused-ignore]

    infinite = (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    if gold.has(*infinite) or answer.has(*infinite):
        return False
    compared = False
    names = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for numerator, denominator in _POINTS if names else _POINTS[:1]:
        point = {name: sympy.Rational(numerator + n, denominator) for n, name in enumerate(names)}
        values = [sympy.N(side.subs(point).doit(), 60) for side in (gold, answer)]
        if not all(value.is_number and value.is_finite for value in values):
            continue
        compared = True
        difference, size = abs(values[0] - values[1]), max(abs(value) for value in values)
        if not all(_has_no_digits(value) for value in values) and not bool(difference <= _TOLERANCE * size):
            return False
    return True if compared else None


def _is_rounded(gold: Any, answer: Any) -> bool:
    """Return whether a rational answer equals an irrational gold value to 6 significant digits."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    if gold.free_symbols or gold.is_rational or not answer.is_Rational:
        return False
    exact = sympy.N(gold, 30)
    return bool(exact.is_finite and exact.is_real and abs(exact - answer) <= 1e-6 * abs(exact))


def _has_no_digits(value: Any) -> bool:
    """Return whether no digit of the value is certain, which in sympy means that it is probably zero."""
    return all(part == 0 or getattr(part, "_prec", 0) == 1 for part in value.as_real_imag())


def _same_equation(gold_equation: Any, equation: Any) -> bool:
    """Return whether the equations' differences of sides are constant multiples of each other."""
    import sympy  # type: ignore[import-untyped,unused-ignore]

    if _is_solved(gold_equation) != _is_solved(equation):
        return False
    gold, answer = gold_equation.lhs - gold_equation.rhs, equation.lhs - equation.rhs
    if gold.free_symbols != answer.free_symbols or not gold.free_symbols:
        return False
    ratio = sympy.simplify(gold / answer)
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def _is_solved(relation: Any) -> bool:
    """Return whether a relation has a symbol on one side and a number on the other: x = 2, not 2x+3 = 7."""
    if not hasattr(relation, "lhs"):
        return False
    one, other = relation.lhs, relation.rhs
    return bool((one.is_Symbol and not other.free_symbols) or (other.is_Symbol and not one.free_symbols))
