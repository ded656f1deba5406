r"""Decide whether an answer equals the gold answer, as far as that is possible without computer algebra.

What cannot be decided on the text is asked of ``equal``: the calling process raises :class:`Undecided` there
and hands the pair to a worker; the worker asks sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache

from hacrl.tasks.math.intervals import NAME, as_interval
from hacrl.tasks.math.latex import text_content, tidy
from hacrl.tasks.math.numbers import is_grouped, read_number, spell_out
from hacrl.tasks.math.shapes import Shape, read_shape
from hacrl.tasks.math.units import Quantity, measures_agree, part_unit

Equal = Callable[[str, str], bool]  # (gold, answer): two values in tidied LaTeX

_BASED = re.compile(r"([0-9A-Fa-f]+)_\{([0-9]+)\}")
_CLOCK = re.compile(r"([0-9]{1,2}(?::[0-9]{2}){0,2})(?:\\text\{)?([AaPp])\.? ?[Mm]\.?\}?")
_WORD = re.compile(r"\\text\{|[^A-Za-z0-9:]")


class Undecided(Exception):  # noqa: N818 - no error, but a question
    """The text alone does not say; computer algebra is needed."""


def undecided(gold: str, answer: str) -> bool:
    """The ``equal`` of a process that has no computer algebra."""
    raise Undecided


def is_readable(text: str) -> bool:
    """Whether the text can be an answer at all."""
    return _read(text) is not None


def answers_match(gold: str, answer: str, equal: Equal) -> bool:
    """Whether the answer (a box's content) is the gold one. Nothing equals an empty gold answer."""
    gold_value, value = read_number(gold.strip()), read_number(answer.strip())
    if gold_value is not None and value is not None:
        return gold_value == value
    gold_shape, shape = _read(gold), _read(answer)
    return gold_shape is not None and shape is not None and _match(gold_shape, shape, equal)


@lru_cache(maxsize=8192)  # a step judges many responses to few problems
def _read(text: str) -> Shape | None:
    tokens = tidy(text)
    return read_shape(tokens) if tokens else None


def forget() -> None:
    """Forget the texts read so far, for measurements."""
    _read.cache_clear()


def _match(gold: Shape, answer: Shape, equal: Equal) -> bool:
    if gold.text == answer.text and gold.kind == answer.kind:
        return True
    if gold.kind == "equation" or answer.kind == "equation":
        return _match_equations(gold, answer, equal)
    if gold.kind == "value" and answer.kind == "value":
        return _match_values(gold, answer, equal)
    if gold.kind == "list" and is_grouped(answer.text):  # 81,256 where two numbers are wanted
        answer = read_shape(list(answer.text.replace(",", ";")))
    if gold.kind != answer.kind:
        gold, answer = as_interval(gold, answer), as_interval(answer, gold)
        return gold.kind == answer.kind == "tuple" and _match(gold, answer, equal)
    if gold.brackets != answer.brackets or len(gold.parts) != len(answer.parts):
        return False
    if gold.kind in ("tuple", "matrix"):
        return all(_match(g, a, equal) for g, a in zip(gold.parts, answer.parts, strict=True))
    named = {part.kind == "equation" for part in (*gold.parts, *answer.parts)}
    if len(named) > 1:  # x=1, y=2 against 1, 2: only the order says which is which
        return all(_match(g, a, equal) for g, a in zip(gold.parts, answer.parts, strict=True))
    return _match_in_any_order(gold.parts, answer.parts, equal)


def _match_in_any_order(gold: Sequence[Shape], answer: Sequence[Shape], equal: Equal) -> bool:
    """Equality is transitive, so the first partner that fits will do. Equal texts are paired first."""
    left = list(answer)
    asked = []
    for part in gold:
        twin = next((at for at, other in enumerate(left) if other.text == part.text), None)
        if twin is None:
            asked.append(part)
        else:
            left.pop(twin)
    for part in asked:
        partner = next((at for at, other in enumerate(left) if _match(part, other, equal)), None)
        if partner is None:
            return False
        left.pop(partner)
    return True


def _match_equations(gold: Shape, answer: Shape, equal: Equal) -> bool:
    if gold.kind == answer.kind == "equation":
        same_name = gold.parts[0].text == answer.parts[0].text
        if same_name:
            return _match(gold.parts[-1], answer.parts[-1], equal)
        if len(gold.parts) > 2 or len(answer.parts) > 2 or gold.parts[-1].kind != "value":
            return False
        if answer.parts[-1].kind != "value" or any("\\in" in s.tokens for s in (gold, answer)):
            return False
        return equal(gold.text, answer.text)
    if gold.kind == "equation":
        return _is_name(gold.parts[0]) and _match(gold.parts[-1], answer, equal)
    sides = answer.parts[1:] if _is_name(answer.parts[0]) else answer.parts
    return all(_match(gold, side, equal) for side in reversed(sides))  # 2+3=5 is 5; 9=1 is not 1


def _is_name(shape: Shape) -> bool:
    if shape.kind in ("tuple", "list"):
        return all(_is_name(part) for part in shape.parts)
    return NAME.fullmatch(shape.text) is not None


def _match_values(gold: Shape, answer: Shape, equal: Equal) -> bool:
    if any(text_content(shape.text) is not None and len(shape.tokens) == 1 for shape in (gold, answer)):
        return _same_words(gold.text, answer.text)
    if (clock := _CLOCK.fullmatch(gold.text)) and (other_clock := _CLOCK.fullmatch(answer.text)):
        return (
            clock.group(1) == other_clock.group(1) and clock.group(2).lower() == other_clock.group(2).lower()
        )
    one, other = part_unit(list(gold.tokens)), part_unit(list(answer.tokens))
    if not measures_agree(one, other):
        return False
    gold_value, value = read_number(one.value), read_number(other.value)
    if gold_value is not None and value is not None:
        return _same_number(gold_value, one, value, other)
    if one.scale != other.scale or (one.percent != other.percent and "%" in gold.text):
        return False
    if one.value == other.value:
        return True
    bases = [_BASED.fullmatch(q.value) for q in (one, other)]
    if any(bases):  # 203_7 is neither 203 nor 203_8
        return len({based.groups() if based else None for based in bases}) == 1
    return equal(spell_out(one.value), spell_out(other.value))


def _same_number(gold: Fraction, gold_quantity: Quantity, answer: Fraction, quantity: Quantity) -> bool:
    gold, answer = gold * gold_quantity.scale, answer * quantity.scale
    if gold == answer:
        return True
    if gold_quantity.percent == quantity.percent:
        return False
    return gold / 100 == answer if gold_quantity.percent else gold == answer / 100  # 50% is 50, or 0.5


def _same_words(gold: str, answer: str) -> bool:
    """Names, days, choices: letters count, spaces and punctuation do not, nor does case beyond one letter."""
    one, other = (_WORD.sub("", text) for text in (gold, answer))
    if not one or not other:
        return False
    return one == other or (len(one) > 1 and one.casefold() == other.casefold())
