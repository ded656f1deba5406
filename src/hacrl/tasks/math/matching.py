r"""Decide whether an answer equals the gold answer, as far as possible without computer algebra.

The callback ``equal`` compares two values that their text does not decide. In the training process it raises
:class:`NeedsAlgebra`, and the pair goes to a worker process. In the worker it calls sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from hacrl.tasks.math.normalisation import normalise, text_content
from hacrl.tasks.math.numbers import expand_for_parser, has_thousands_separators, parse_number
from hacrl.tasks.math.structure import NAME, Structure, inequality_to_interval, parse_structure
from hacrl.tasks.math.units import Quantity, split_unit, units_compatible

ValuesEqual = Callable[[str, str], bool]  # (gold, answer): two values in normalised LaTeX

_WITH_BASE = re.compile(r"([0-9A-Fa-f]+)_\{([0-9]+)\}")
_TIME = re.compile(r"([0-9]{1,2}(?::[0-9]{2}){0,2})(?:\\text\{)?([AaPp])\.? ?[Mm]\.?\}?")
_NOT_A_LETTER = re.compile(r"\\text\{|[^A-Za-z0-9:]")


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
    return gold_structure is not None and structure is not None and _match(gold_structure, structure, equal)


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
        gold, answer = inequality_to_interval(gold, answer), inequality_to_interval(answer, gold)
        return gold.kind == answer.kind == "tuple" and _match(gold, answer, equal)
    if gold.brackets != answer.brackets or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("tuple", "matrix"):
        return _match_in_order(gold.parts, answer.parts, equal)
    has_name = {part.kind == "equation" for part in (*gold.parts, *answer.parts)}
    if len(has_name) > 1:  # x=1, y=2 against 1, 2: only the order assigns values to names
        return _match_in_order(gold.parts, answer.parts, equal)
    return _match_in_any_order(gold.parts, answer.parts, equal)


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
        canonical = gold.parts[0].text == answer.parts[0].text
        if canonical:
            return _match(gold.parts[-1], answer.parts[-1], equal)
        if len(gold.parts) > 2 or len(answer.parts) > 2 or gold.parts[-1].kind != "value":
            return False
        if answer.parts[-1].kind != "value" or any("\\in" in side.tokens for side in (gold, answer)):
            return False
        return equal(gold.text, answer.text)
    if gold.kind == "equation":
        return _is_name(gold.parts[0]) and _match(gold.parts[-1], answer, equal)
    sides = answer.parts[1:] if _is_name(answer.parts[0]) else answer.parts
    return all(_match(gold, side, equal) for side in reversed(sides))  # 2+3=5 equals 5; 9=1 does not equal 1


def _is_name(structure: Structure) -> bool:
    if structure.kind in ("tuple", "list"):
        return all(_is_name(part) for part in structure.parts)
    return NAME.fullmatch(structure.text) is not None


def _match_values(gold: Structure, answer: Structure, equal: ValuesEqual) -> bool:
    if any(text_content(side.text) is not None and len(side.tokens) == 1 for side in (gold, answer)):
        return _same_words(gold.text, answer.text)
    if (gold_time := _TIME.fullmatch(gold.text)) and (time := _TIME.fullmatch(answer.text)):
        return gold_time.group(1) == time.group(1) and gold_time.group(2).lower() == time.group(2).lower()
    gold_quantity, quantity = split_unit(list(gold.tokens)), split_unit(list(answer.tokens))
    if not units_compatible(gold_quantity, quantity):
        return False
    gold_value, value = parse_number(gold_quantity.value), parse_number(quantity.value)
    if gold_value is not None and value is not None:
        return _same_number(gold_value, gold_quantity, value, quantity)
    if gold_quantity.scale != quantity.scale:
        return False
    if gold_quantity.percent != quantity.percent and "%" in gold.text:
        return False
    if gold_quantity.value == quantity.value:
        return True
    bases = [_WITH_BASE.fullmatch(side.value) for side in (gold_quantity, quantity)]
    if any(bases):  # 203_7 is neither 203 nor 203_8
        return len({base.groups() if base else None for base in bases}) == 1
    return equal(expand_for_parser(gold_quantity.value), expand_for_parser(quantity.value))


def _same_number(gold: Fraction, gold_quantity: Quantity, answer: Fraction, quantity: Quantity) -> bool:
    gold, answer = gold * gold_quantity.scale, answer * quantity.scale
    if gold == answer:
        return True
    if gold_quantity.percent == quantity.percent:
        return False
    return gold / 100 == answer if gold_quantity.percent else gold == answer / 100  # 50% equals 50 and 0.5


def _same_words(gold: str, answer: str) -> bool:
    """Compare names, days and choices without spaces and punctuation; case counts for single letters only."""
    gold, answer = (_NOT_A_LETTER.sub("", text) for text in (gold, answer))
    if not gold or not answer:
        return False
    return gold == answer or (len(gold) > 1 and gold.casefold() == answer.casefold())
