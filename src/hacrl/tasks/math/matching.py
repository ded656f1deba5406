r"""Decide whether an answer equals the gold answer, as far as possible without computer algebra.

The callback ``equal`` compares two values that their text does not decide. In the training process it raises
:class:`NeedsAlgebra`, and the pair goes to a worker process. In the worker it calls sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from hacrl.tasks.math.arithmetic import rational_value
from hacrl.tasks.math.normalisation import normalise, unwrap
from hacrl.tasks.math.numbers import expand_for_parser, has_thousands_separators, parse_number
from hacrl.tasks.math.operators import has_new_operator, is_working
from hacrl.tasks.math.parser_input import parser_input
from hacrl.tasks.math.structure import (
    ELLIPSIS,
    NAME,
    Structure,
    inequality_to_interval,
    parse_structure,
)
from hacrl.tasks.math.units import Quantity, split_unit, units_compatible

ValuesEqual = Callable[[str, str], bool]  # (gold, answer): two values in normalised LaTeX

_WITH_BASE = re.compile(r"([0-9A-Fa-f]+)_\{([0-9]+)\}")
_TIME = re.compile(r"([0-9]{1,2}(?::[0-9]{2}){0,2})(?:\\text\{)?([AaPp])\.? ?[Mm]\.?\}?")
_ROUNDED = re.compile(r"\\approx(-?[0-9]*\.([0-9]{1,9}))$")
_TEXT_LETTER = re.compile(r"\\text\{([A-Za-z])\}")
_TEXT_INDEX = re.compile(r"_\{\\text\{([A-Za-z0-9]+)\}\}")
# "twice the number = 6" does not say that the number is 6
_NOT_A_NAME = re.compile(r"\\text\{(?:.* )?(?:not?|minus|negative|twice|thrice|double|triple|half)(?: .*)?\}")
_ZERO_MINUTES = re.compile(r"(?::00)+$")
_WORDS = re.compile(r"[^\W\d_][^\W\d_.'-]+(?:[.'-][^\W\d_.'-]+)*")  # two letters or more


class NeedsAlgebra(Exception):  # noqa: N818 - control flow, not an error
    """The texts do not decide whether two values are equal."""


def defer_to_worker(gold: str, answer: str) -> bool:
    """Raise :class:`NeedsAlgebra`: the ``equal`` of a process without computer algebra."""
    raise NeedsAlgebra


def answers_match(gold: str, answer: str, equal: ValuesEqual) -> bool:
    """Return whether a box's content equals the gold answer. Nothing equals an empty gold answer."""
    gold_value, value = parse_number(gold.strip()), parse_number(answer.strip())
    if gold_value is not None and value is not None:
        return gold_value == value
    gold_structure, structure = parse_answer(gold), parse_answer(answer)
    if gold_structure is None or structure is None or has_new_operator(gold_structure, structure):
        return False
    return _match(gold_structure, structure, equal)


@lru_cache(maxsize=8192)  # a step verifies many responses to few problems
def parse_answer(text: str) -> Structure | None:
    """Return the structure of a text; None if it cannot be an answer."""
    tokens = normalise(text)
    return parse_structure(tokens) if tokens else None


def _match(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    if gold.text == answer.text and gold.kind == answer.kind:
        return True
    if gold.kind == "equation" or answer.kind == "equation":
        return _match_equations(gold, answer, equal)
    if gold.kind == "value" and answer.kind == "value":
        return _match_values(gold, answer, equal)
    if gold.kind == "list" and has_thousands_separators(answer.text):  # 81,256 against a list
        answer = parse_structure(list(answer.text.replace(",", ";")))
    if gold.kind != answer.kind:
        if {gold.kind, answer.kind} == {"tuple", "list"}:
            return _match_point(gold, answer, equal)
        return _match_intervals(gold, answer, equal)
    if gold.brackets != answer.brackets or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("tuple", "matrix") or _is_sequence(gold) or _is_sequence(answer):
        return _match_in_order(gold.parts, answer.parts, equal)
    if gold.kind == "list" and _assigns_values(gold.parts, answer.parts):
        return (
            _names_in_order(gold)
            and _names_in_order(answer)
            and _match_in_order(gold.parts, answer.parts, equal)
        )
    return _match_in_any_order(gold.parts, answer.parts, equal)


def _match_point(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    """Compare ``(1,2)`` with ``x=1, y=2``: different names in alphabetical order name the coordinates."""
    point, named = (gold, answer) if gold.kind == "tuple" else (answer, gold)
    if point.brackets != "()" or named.brackets or len(point.parts) != len(named.parts):
        return False
    sides = [part.parts for part in named.parts if part.kind == "equation" and len(part.parts) == 2]
    names = [left.text for left, _ in sides if _is_name(left)]
    if len(names) != len(named.parts) or names != sorted(set(names)):
        return False
    if any(part.kind == "equation" for part in point.parts):
        return False
    values = [right for _, right in sides]
    first, second = (point.parts, values) if point is gold else (values, point.parts)
    return _match_in_order(first, second, equal)


def _match_intervals(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    """Compare inequalities with intervals, and ``x<1`` or ``x>3`` with a union."""
    for one, other in ((gold, answer), (answer, gold)):
        if one.kind == "union" and other.kind == "list" and other.brackets == "or":
            intervals = [inequality_to_interval(part, one.parts[0]) for part in other.parts]
            if len(one.parts) != len(intervals):
                return False
            if one is gold:
                return _match_in_any_order(one.parts, intervals, equal)
            return _match_in_any_order(intervals, one.parts, equal)
    if _may_be_a_point(gold):
        return False
    gold, answer = inequality_to_interval(gold, answer), inequality_to_interval(answer, gold)
    return gold.kind == answer.kind == "tuple" and _match(gold, answer, equal)


def _may_be_a_point(structure: Structure) -> bool:
    """Return whether ``(1,2)`` may be a point: no inequality equals it. ``(1,2]`` is an interval."""
    return structure.brackets == "()" and not any("\\infty" in part.tokens for part in structure.parts)


def _is_sequence(structure: Structure) -> bool:
    """Return whether a list goes on with an ellipsis, which makes its order count."""
    return structure.kind == "list" and any(ELLIPSIS in part.tokens for part in structure.parts)


def _assigns_values(gold: Sequence[Structure], answer: Sequence[Structure]) -> bool:
    """Return whether only one list names its values, and gives them different names.

    For ``x=1, y=2`` against ``1, 2`` only the order assigns values to names. ``x=4`` and ``x=-1`` are the
    solutions of one unknown, in any order.
    """
    named = [[part.parts[0].text for part in side if part.kind == "equation"] for side in (gold, answer)]
    if all(len(names) == len(side) for names, side in zip(named, (gold, answer), strict=True)):
        return False
    return len({name for names in named for name in names}) > 1


def _names_in_order(structure: Structure) -> bool:
    """Return whether a list's names are in alphabetical order, the order of values without names."""
    names = [part.parts[0].text for part in structure.parts if part.kind == "equation"]
    return names == sorted(names)


def _match_in_order(gold: Sequence[Structure], answer: Sequence[Structure], equal: ValuesEqual) -> bool:
    return all(_match(gold_part, part, equal) for gold_part, part in zip(gold, answer, strict=True))


def _match_in_any_order(gold: Sequence[Structure], answer: Sequence[Structure], equal: ValuesEqual) -> bool:
    """Pair equal texts first, then each part with its first match: equality is transitive."""
    unmatched = list(answer)
    without_equal_text = []
    for part in gold:
        index = next((i for i, other in enumerate(unmatched) if other.text == part.text), None)
        if index is None:
            without_equal_text.append(part)
        else:
            unmatched.pop(index)
    for part in without_equal_text:
        index = next((i for i, other in enumerate(unmatched) if _match(part, other, equal)), None)
        if index is None:
            return False
        unmatched.pop(index)
    return True


def _match_equations(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    if gold.kind == answer.kind == "equation":
        if len(gold.parts) > 2:  # x = y = 5: every side counts
            return len(gold.parts) == len(answer.parts) and _match_in_order(gold.parts, answer.parts, equal)
        if gold.parts[0].text == answer.parts[0].text:
            return all(_match(gold.parts[-1], side, equal) for side in reversed(answer.parts[1:]))
        if len(answer.parts) > 2 or gold.parts[-1].kind != "value" or answer.parts[-1].kind != "value":
            return False
        return _equal_expressions(gold.text, answer.text, equal)
    if gold.kind == "equation":
        sides = gold.parts[1:] if _is_name(gold.parts[0]) else gold.parts
        return all(_match(side, answer, equal) for side in reversed(sides))  # x=5; or 0.56 = 56%
    working = [side for side in answer.parts[:-1] if not is_working(side)]
    if working and _is_name(working[0]):
        working = working[1:]
    last = answer.parts[-1]
    if working and (rounded := _ROUNDED.search(answer.text)) and rounded.group(1) == last.text:
        if not _is_rounding(gold, last, len(rounded.group(2)), equal):
            return False
    else:
        working.append(last)
    return all(_match(gold, side, equal) for side in reversed(working))  # 2+3=5 is 5; 9=1 is not 1


def _is_rounding(gold: Structure, rounded: Structure, places: int, equal: ValuesEqual) -> bool:
    """Return whether a decimal is the gold value rounded to so many places, or equals it."""
    if gold.kind != "value" or _match(gold, rounded, equal):
        return gold.kind == "value"
    value, decimal = rational_value(gold.text), rational_value(rounded.text)
    if decimal is None:
        return False
    scaled = decimal * Fraction(10) ** places
    if value is not None:
        return abs(value * Fraction(10) ** places - scaled) <= Fraction(1, 2)
    nearest = rf"\lfloor10^{{{places}}}\cdot({gold.text})+\frac{{1}}{{2}}\rfloor"
    return _equal_expressions(str(scaled), nearest, equal)


def _is_name(structure: Structure) -> bool:
    """Return whether a side of an equation names the other. The names of a pair are in order: ``(x,y)``."""
    if structure.kind in ("tuple", "list"):
        names = [part.text for part in structure.parts]
        return names == sorted(names) and all(_is_name(part) for part in structure.parts)
    if _NOT_A_NAME.search(structure.text):
        return False
    return NAME.fullmatch(structure.text) is not None


def _match_values(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    if not gold.text or not answer.text:
        return False
    gold_words, words = (unwrap(side.text).removeprefix("+") for side in (gold, answer))
    if gold_words == words:
        return True
    if (gold_words != gold.text or words != answer.text) and _are_words(gold_words, words):
        return gold_words.casefold() == words.casefold()
    if (gold_time := _TIME.fullmatch(gold_words)) and (time := _TIME.fullmatch(words)):
        hours = [_ZERO_MINUTES.sub("", found.group(1)) for found in (gold_time, time)]
        return hours[0] == hours[1] and gold_time.group(2).lower() == time.group(2).lower()
    gold_quantity, quantity = split_unit(gold.tokens, trusted=True), split_unit(answer.tokens)
    if not units_compatible(gold_quantity, quantity):
        return False
    gold_value, value = rational_value(gold_quantity.value), rational_value(quantity.value)
    if gold_value is not None and value is not None:
        return _same_number(gold_value, gold_quantity, value, quantity)
    if gold_quantity.percent != quantity.percent or gold_quantity.scale != quantity.scale:
        return False
    if (
        gold_quantity.unit is not None
        and quantity.unit is not None
        and gold_quantity.factor != quantity.factor
    ):
        return False
    if gold_quantity.value == quantity.value:
        return True
    bases = [_WITH_BASE.fullmatch(unwrap(side.value)) for side in (gold_quantity, quantity)]
    if any(bases):  # 203_7 is neither 203 nor 203_8
        return len({base.groups() if base else None for base in bases}) == 1
    gold_text, text = (_with_plain_letters(side.value) for side in (gold_quantity, quantity))
    if "=" in gold_text or "=" in text:
        return False
    return _equal_expressions(expand_for_parser(gold_text), expand_for_parser(text), equal)


def _with_plain_letters(text: str) -> str:
    r"""Return text with upright variables and words of indices as the parser reads them: ``x_{red}``."""
    return _TEXT_INDEX.sub(r"_{\1}", _TEXT_LETTER.sub(r" \1", text)) if "\\text{" in text else text


def _equal_expressions(gold: str, answer: str, equal: ValuesEqual) -> bool:
    """Ask ``equal``, unless one text has words or notation that computer algebra does not read."""
    return parser_input(gold) is not None and parser_input(answer) is not None and equal(gold, answer)


def _same_number(gold: Fraction, gold_quantity: Quantity, answer: Fraction, quantity: Quantity) -> bool:
    gold, answer = gold * gold_quantity.scale, answer * quantity.scale
    if gold_quantity.unit is not None and quantity.unit is not None:
        gold, answer = gold * gold_quantity.factor, answer * quantity.factor
    if gold_quantity.percent == quantity.percent:
        return gold == answer
    # 50% equals 0.5, and 50, since problems ask "what percent". But 0.5 and 1.5 may be shares, not percents.
    exact = gold / 100 == answer if gold_quantity.percent else gold == answer / 100
    may_be_percents = gold.denominator == 1 or (gold_quantity.percent and abs(gold) >= 1)
    return exact or (gold == answer and may_be_percents)


def _are_words(*texts: str) -> bool:
    return all(_WORDS.fullmatch(text) for text in texts)
