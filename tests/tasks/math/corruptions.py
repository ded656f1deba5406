r"""Wrong answers made from a gold answer by a small change of its text; no code of the verifier.

Every change is of one kind: sign, operator, digit, scale, unit, wrapper, suffix, dropped part, order,
bracket, word or echo. A rule makes no text where the changed answer would still be right: ``2,1`` for
``1,2``, ``-0`` for ``0``, another unit for a gold answer that names none.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from tests.tasks.math.forms import (
    BASE,
    DECIMAL,
    DEGREES,
    E_NOTATION,
    FRACTION,
    INTEGER,
    MATRIX,
    MONEY,
    PERCENT,
    RATIO,
    UNIT,
    items_of,
    number_of,
)

Change = tuple[str, str]  # kind, content of the box

KINDS = (
    "sign", "operator", "digit", "scale", "unit", "wrapper", "suffix", "dropped part", "order", "bracket",
    "word", "echo",
)  # fmt: skip
PER_RULE = 9  # texts of one rule for one gold answer

_WORDS = re.compile(r"\(?\\(?:text|mbox)\s*\{\s*\(?([A-Za-z][A-Za-z ,]*)\)?\s*\}\)?,?")
_LETTERS = re.compile(r"[A-Za-z]{1,12}")
_DIGITS = re.compile(r"[0-9]+")
_WRAPPERS = ("text", "mathbf", "mathrm", "textbf", "mathit", "mbox", "textrm", "mathsf", "boldsymbol")
_SUFFIXES = (
    r"\text{ minus one}", r"\text{ plus one}", r"\text{ less}", r"\mathrm{x}", "x", r"\text{x}",
    r"\mathbf{y}", "!", r"\text{!}", r"\text{ squared}", r"\text{th}", "...", r"\ldots", r"\pm 1",
    r"\text{ or }787", ", 787", r"\text{ and }787", r"\text{ to }787", r"\text{ and a half}", "^{-1}",
    r"\text{-ish}", ":30", "'", "_{13}", r"\text{ point five}", r"\text{ factorial}", r"\text{ halves}",
    r"\text{ pairs}", r"\cdot\text{half}", r"\mathbf{i}", r"\text{ times }787", r"\text{ mod }787",
    r"\boxed{7}", r"\text{ thirds}", r"\alpha", "^{T}",
)  # fmt: skip
_OTHER_UNITS = {
    "cm": ("nm", "mm", "m", "km", "cm^4", "kg"),
    "centimeters": ("millimeters", "meters", "inches"),
    "m": ("mm", "km", "nm", "s"),
    "meters": ("kilometers", "feet", "millimeters"),
    "km": ("m", "miles", "cm"),
    "inches": ("feet", "centimeters", "yards"),
    "feet": ("inches", "meters", "miles"),
    "ft": ("in", "m", "yd"),
    "miles": ("kilometers", "feet", "yards"),
    "dollars": ("cents", "euros", "thousand dollars"),
    "cents": ("dollars", "euros"),
    "pounds": ("ounces", "kilograms", "tonnes"),
    "gm": ("kg", "mg"),
    "hours": ("minutes", "days", "seconds"),
    "minutes": ("hours", "seconds"),
    "min": ("hours", "seconds"),
    "days": ("hours", "weeks"),
    "degrees": ("radians", "percent"),
    "mph": ("km/h", "miles", "m/s"),
    "USD": ("cents", "euros", "thousand dollars"),
    "gallons": ("quarts", "liters"),
}


def corruptions(gold: str, seed: int = 0) -> list[Change]:
    """Return different wrong answers with their kinds, the same for the same seed."""
    changes: dict[str, str] = {}
    for kind, rule in RULES:
        draw = random.Random(f"{seed}/{kind}/{gold}")
        texts = [text for text in rule(gold) if _squeezed(text) != _squeezed(gold)]
        for text in draw.sample(texts, min(len(texts), PER_RULE)):
            changes.setdefault(text, kind)
    return [(kind, text) for text, kind in changes.items()]


def _squeezed(text: str) -> str:
    return re.sub(r"\s|\\[,;!: ]|\\left|\\right|[{}]", "", text)


def _is_expression(gold: str) -> bool:
    """Whether the text is one value, to which operators can be applied."""
    return not re.search(
        r"\\text|\\mbox|\\begin|[=,:<>%$]|\\le|\\ge|\\in\b|\\cup|\\circ|_|\\infty|\\pm|\\emptyset", gold
    )


def sign(gold: str) -> Iterator[str]:
    """Negate the answer, or flip one sign in it."""
    if _is_expression(gold) and number_of(gold) != 0:
        yield f"-({gold})"
        yield f"-{gold}" if not re.search("[-+]", gold) else f"-[{gold}]"
        yield rf"-\text{{{gold}}}" if gold.isdigit() else rf"-1\cdot({gold})"
    for found in list(re.finditer(r"[-+]", gold))[:PER_RULE]:
        if number_of(gold) == 0 or re.match(r"[-+]\s*\\infty", gold[found.start() :]) or "\\pm" in gold:
            continue
        other = {"+": "-", "-": "+"}[found.group()]
        yield gold[: found.start()] + other + gold[found.end() :]
    for item in _DIGITS.finditer(gold):
        before = gold[: item.start()].rstrip()
        if re.search(r"\\(?:cos|sec)(?: ?\^\{?2\}?)? ?(?:\\left)? ?[{(]*$", before):
            continue  # even
        first = before.endswith(("(", ",", "[", "&", "pmatrix}", "\\\\", "="))
        if first and item.group().strip("0") and not gold[item.end() :].startswith("x^"):
            yield f"{gold[: item.start()]}-{gold[item.start() :]}"


def operator(gold: str) -> Iterator[str]:
    """Apply one more operation, or replace one."""
    if _is_expression(gold):
        number = number_of(gold)
        yield f"{gold}+1"
        yield f"{gold}-1"
        yield f"1-({gold})" if number != Fraction(1, 2) else "1"
        if number != 0:
            yield rf"2\cdot({gold})"
            yield rf"\frac{{{gold}}}{{3}}"
            yield f"({gold})/2"
            if number is None or number not in (1, -1):
                yield rf"\frac{{1}}{{{gold}}}"
                if number is not None and number > 0:
                    yield rf"\sqrt{{{gold}}}"
                    yield f"({gold})^2"
                    yield f"1/({gold})"
                    if number not in (1, 2):
                        yield f"({gold})!" if number.denominator == 1 and number < 50 else f"({gold})^3"
    if "\\sqrt{" in gold and "\\sqrt{x^2" not in gold:
        yield gold.replace("\\sqrt{", "\\sqrt[3]{", 1)
        yield gold.replace("\\sqrt{", "\\sqrt[5]{", 1)
    if "\\cup" in gold:
        yield gold.replace("\\cup", "\\cap", 1)
    for one, other in ((r"\sin", r"\cos"), (r"\cos", r"\sin"), (r"\tan", r"\cot"), (r"\le ", r"\ge "),
                       (r"\le ", "<"), ("<", ">"), (">", "<"), (r"\pi", r"\phi")):  # fmt: skip
        if one in gold:
            yield gold.replace(one, other, 1)
    for found in re.finditer(r"(?<=[0-9a-z}]) ?\+ ?(?=[0-9a-z\\])", gold):
        yield f"{gold[: found.start()]}\\cdot {gold[found.end() :]}"


def digit(gold: str) -> Iterator[str]:
    """Change, insert, drop or swap digits."""
    if re.fullmatch(r"-?0+(\.0+)?", gold):
        yield "1"
        return
    for number in _DIGITS.finditer(gold):
        start, end = number.span()
        if _digit_is_idle(gold, start):
            continue
        text = number.group()
        for at in {0, len(text) - 1, len(text) // 2}:
            for other in {(int(text[at]) + 1) % 10, (int(text[at]) + 5) % 10}:
                changed = f"{text[:at]}{other}{text[at + 1 :]}"
                yield gold[:start] + changed + gold[end:]
        yield f"{gold[:start]}{text[0]}7{text[1:]}{gold[end:]}"
        if len(text) > 1 and text[0] != "0" and gold[start - 1 : start] != ".":
            yield gold[:start] + text[1:] + gold[end:]
            swapped = text[1] + text[0] + text[2:]
            if swapped != text:
                yield gold[:start] + swapped + gold[end:]


def _digit_is_idle(gold: str, start: int) -> bool:
    """Whether a change of the digits may leave the value: a power of 1 or 0, a part of 0, or is an index."""
    return gold[:start].rstrip().endswith(("1^{", "1^", "0^{", "0^", "\\frac{0}{", "_", "_{", "circ", "0/"))


def scale(gold: str) -> Iterator[str]:
    """Change the order of magnitude."""
    number = number_of(gold)
    if number is not None and number != 0:
        yield rf"{gold}\cdot 10"
        yield rf"{gold} \times 10^{{3}}"
        yield rf"{gold} \times 10^{{-2}}"
        for word in (
            "hundred",
            "thousand",
            "million",
            "billion",
            "tenths",
            "hundredths",
            "thousandths",
            "dozen",
        ):
            yield rf"{gold}\text{{ {word}}}"
        yield f"{gold} million"
        yield rf"\text{{{gold} thousand}}" if "\\" not in gold else rf"{gold}\mathrm{{k}}"
        if number.denominator > 1:
            yield rf"{gold}\%"
            yield rf"{gold}\text{{ percent}}"
        yield rf"{gold}\text{{ per mille}}"
    if INTEGER.fullmatch(gold) and number:
        yield f"{gold}0"
        yield f"{gold}e2"
        yield f"{gold[:-1]}.{gold[-1]}" if abs(number) > 9 else f"{gold}.{abs(int(gold))}"
        yield f"{gold},000"
    if found := DECIMAL.fullmatch(gold):
        yield gold.replace(".", "") if found and Fraction(gold) else f"{gold}1"
        yield f"{float(number or 0) * 1000:.10g}"
    if found := PERCENT.fullmatch(gold):
        value = Fraction(found.group(1))
        yield f"{float(value / 1000):.10g}"
        yield f"{float(value / 10):.10g}\\%"
        yield f"{float(value * 100):.10g}"
        yield rf"{found.group(1)}\text{{ per mille}}"
        yield rf"{found.group(1)}\text{{ thousand}}"
    if found := E_NOTATION.fullmatch(gold):
        yield f"{found.group(1)}e{int(found.group(2)) + 1}"
        yield f"{found.group(1)}e{-int(found.group(2)) or 3}"
        yield rf"{found.group(1)}\times 10^{{{int(found.group(2)) - 3}}}"


def unit(gold: str) -> Iterator[str]:
    """Replace the unit that the gold answer names by another one."""
    if (found := UNIT.fullmatch(gold)) and re.search("[0-9]", found.group(1)):
        value, _, words, power, exponent = found.groups()
        words = words.strip().rstrip(".")
        for other in _OTHER_UNITS.get(words, ("kg", "seconds", "dollars", "cm", "thousand")):
            yield rf"{value}\text{{ {other}}}{power or ''}"
        if words.split()[0] in ("square", "sq", "sq."):
            yield rf"{value}\text{{ cubic {' '.join(words.split()[1:])}}}"
            yield rf"{value}\text{{ {' '.join(words.split()[1:])}}}"
        else:
            yield rf"{value}\text{{ {words}}}^{{{5 - int(exponent or 2)}}}"
            yield rf"{value}\text{{ {words} per second}}"
        yield rf"{value}\text{{ of a {words}}}"
        yield rf"{value}\text{{ minus {words}}}"
    if found := MONEY.fullmatch(gold):
        for other in ("cents", "euros", "thousand dollars", "per cent of it", "pounds", "cents each"):
            yield rf"{found.group(1)}\text{{ {other}}}"
        yield f"€{found.group(1)}"
        yield rf"{gold}\text{{ cents}}"
    if found := DEGREES.fullmatch(gold):
        yield rf"{found.group(1)}\text{{ radians}}"
        yield rf"{found.group(1)}\text{{ rad}}"
        yield rf"{found.group(1)}\text{{ minutes}}"
        yield rf"{found.group(1)}\pi"


def wrapper(gold: str) -> Iterator[str]:
    """Hide another value in a font command or text."""
    number = number_of(gold)
    if number is None or number == 0:
        if _is_expression(gold) and number is None:
            yield rf"\mathbf{{-}}({gold})"
            yield rf"\text{{2}}({gold})"
            yield rf"\mathrm{{-}}\left({gold}\right)"
            yield rf"({gold})\mathbf{{+1}}"
            yield rf"({gold})\textbf{{-2}}"
        return
    for command in _WRAPPERS:
        negated = gold[1:] if gold.startswith("-") else f"-{gold}"
        yield rf"\{command}{{{negated}}}"
        if "\\" not in gold:
            yield rf"\{command}{{{gold}x}}"
            yield rf"\{command}{{{gold}+1}}"
            yield rf"\{command}{{{gold}, 787}}"
            yield rf"\{command}{{{gold} minus one}}"
            yield rf"\{command}{{{gold}.5}}" if INTEGER.fullmatch(gold) else rf"\{command}{{7{gold}}}"
            if number not in (1, -1):
                yield rf"\{command}{{1/{gold}}}"
                yield rf"\{command}{{({gold})^2}}"
        yield rf"{gold}\{command}{{+1}}"
        yield rf"{gold}\{command}{{x}}"
        yield rf"\{command}{{-}}{gold}" if not gold.startswith("-") else rf"\{command}{{2}}{gold}"


def suffix(gold: str) -> Iterator[str]:
    """Append what changes the value or its meaning."""
    if _WORDS.fullmatch(gold) or _LETTERS.fullmatch(gold):
        yield f"{gold}, 787"
        yield rf"{gold}\text{{ or }}787"
        yield rf"{gold}\text{{ not}}"
        return
    idle = set()
    number = number_of(gold)
    if number is None or number.denominator > 1 or number in (0, 1, 2) or number > 1000:
        idle = {"!", r"\text{!}"}  # 1! is 1, and 10000! only runs into the time limit
    if re.search(r"(?:^|[^0-9.])0$", gold):
        idle |= {"x", r"\mathrm{x}", r"\text{x}", r"\mathbf{y}", r"\mathbf{i}", r"\alpha"}  # 0x is 0
    if re.search(r"(?:^|[^0-9.])1$", gold):
        idle |= {"^{-1}"}
    for text in _SUFFIXES:
        ends_in_text = gold.rstrip().endswith("}") and "\\text" in gold
        if text in idle:
            continue
        if not (ends_in_text and text.startswith(("'", "!"))):
            yield gold + text


def dropped_part(gold: str) -> Iterator[str]:
    """Leave a part out."""
    if found := items_of(gold):
        opening, items, closing = found
        for at in range(len(items)):
            rest = items[:at] + items[at + 1 :]
            yield opening + ", ".join(rest) + closing
            yield (
                opening + ", ".join([*rest, rest[0]]) + closing
                if rest[0] != items[at]
                else opening + "," + closing
            )
        yield opening + ", ".join([*items, "787"]) + closing
        yield opening + ", ".join([*items, ""]) + closing if opening else ", ".join(items[:-1])
    if "\\cup" in gold:
        parts = gold.split("\\cup")
        for at in range(len(parts)):
            yield "\\cup".join(parts[:at] + parts[at + 1 :])
    if found := MATRIX.fullmatch(gold):
        rows = found.group(2).split(r"\\")
        for at in range(len(rows)):
            yield found.group(1) + r"\\".join(rows[:at] + rows[at + 1 :]) + found.group(3)
        if "&" in gold:
            yield found.group(1) + r"\\".join(row.partition("&")[2] for row in rows) + found.group(3)
    if found := BASE.fullmatch(gold):
        yield found.group(1)
        yield f"{found.group(1)}_{{{int(found.group(2)) + 1}}}"
    if found := RATIO.fullmatch(gold):
        yield found.group(1)
    if _is_expression(gold) and number_of(gold) is None:
        for piece in (
            r"\\sqrt",
            r"\\pi",
            r"\^\{?[0-9]+\}?",
            r"[0-9]* ?\\sqrt ?\{[^{}]*\}",
            r"[-+] ?[0-9a-z]+$",
            "i$",
        ):
            for found in list(re.finditer(piece, gold))[:2]:
                rest = gold[: found.start()] + gold[found.end() :]
                if rest.strip(" -+({})") and not re.search(r"\{\}|\\frac\{[^{}]*\}$|1\^|[-+]$", rest):
                    yield rest


def order(gold: str) -> Iterator[str]:
    """Reorder what is ordered."""
    if found := items_of(gold):
        opening, items, closing = found
        if opening and opening != "\\{":
            swapped = [items[1], items[0], *items[2:]]
            if _squeezed(items[0]) != _squeezed(items[1]):
                yield opening + ", ".join(swapped) + closing
            if _squeezed(items[0]) != _squeezed(items[-1]):
                yield opening + ", ".join(reversed(items)) + closing
            names = ("x", "y", "z", "w")[: len(items)]
            if (
                len(items) in (2, 3)
                and opening.endswith("(")
                and closing.endswith(")")
                and len(set(items)) == len(items)
            ):
                yield f"({','.join(reversed(names))})={gold}"
    if (found := FRACTION.fullmatch(gold)) and found.group(2).lstrip("-") != found.group(3):
        yield rf"{found.group(1)}\frac{{{found.group(3)}}}{{{found.group(2)}}}"
        yield f"{found.group(1)}{found.group(3)}/{found.group(2)}"
    if INTEGER.fullmatch(gold):
        digits = gold.lstrip("-")
        reverse = digits[::-1]
        if int(reverse) != int(digits):
            yield gold.replace(digits, reverse)
    if found := RATIO.fullmatch(gold):
        yield f"{found.group(2)}:{found.group(1)}"
    for found in re.finditer(r"([0-9a-z])\^\{?([0-9a-z])\}?", gold):
        base, power = found.groups()
        if base != power and {base, power} != {"2", "4"} and base not in "01":
            yield f"{gold[: found.start()]}{power}^{{{base}}}{gold[found.end() :]}"
    if found := MATRIX.fullmatch(gold):
        rows = [
            [cell.strip() for cell in row.split("&")] for row in found.group(2).split(r"\\") if row.strip()
        ]
        for other in (
            rows[::-1],
            [row[::-1] for row in rows],
            [list(column) for column in zip(*rows, strict=False)],
        ):
            if other != rows:
                yield found.group(1) + r"\\".join("&".join(row) for row in other) + found.group(3)


def bracket(gold: str) -> Iterator[str]:
    """Change which ends belong to an interval, or turn a point, set or list into another."""
    if not (found := items_of(gold)):
        return
    opening, items, closing = found
    inner = ", ".join(items)
    if not opening:
        yield f"({inner})"
        yield f"[{inner}]"
        yield f"{inner}, \\ldots"
        yield rf"\{{{inner}, ...\}}"
        return
    if opening == "\\{":
        yield f"({inner})"
        return
    plain = {"\\left(": "(", "\\left[": "["}.get(opening, opening)
    end = {"\\right)": ")", "\\right]": "]"}.get(closing, closing)
    yield f"{'[' if plain == '(' else '('}{inner}{end}"
    yield f"{plain}{inner}{']' if end == ')' else ')'}"
    yield inner
    yield rf"\{{{inner}\}}"


def word(gold: str) -> Iterator[str]:
    """Change a word, name or choice."""
    if found := _WORDS.fullmatch(gold) or _LETTERS.fullmatch(gold):
        words = found.group(1) if found.re is _WORDS else gold
        yield rf"\text{{not {words}}}"
        yield rf"\text{{{words}x}}"
        yield rf"\text{{{words} or {words}}}"
        yield rf"\mathbf{{{words}'}}"
        yield rf"-\text{{{words}}}"
        yield rf"\text{{{words} 2}}"
        if len(words) > 1 and words[::-1] != words and "," not in words:
            yield rf"\text{{{words[::-1]}}}" if not re.fullmatch("[a-z]{2}", gold) else "q"
            yield rf"\text{{{words[:-1]}}}"
            yield rf"\text{{{words[1:]}}}"


def echo(gold: str) -> Iterator[str]:
    """Repeat what a problem could ask instead of its value."""
    number = number_of(gold)
    if number is None or "\\" in gold:
        return
    yield rf"\int_0^{{{gold}}} 1\,dx"
    yield rf"\lim_{{x\to {gold}}} x"
    yield rf"\max({gold}, {gold}-1)"
    yield rf"x-({gold})=0"
    yield rf"2x={gold}\cdot 2"
    if number > 0 and INTEGER.fullmatch(gold):
        yield rf"\sum_{{k=1}}^{{{gold}}} 1"
        yield rf"\prod_{{k={gold}}}^{{{gold}}} k"
        yield rf"\gcd({gold},{gold})"
        yield rf"{gold} \bmod {int(gold) + 1}"
        yield rf"\frac{{d}}{{dx}} {gold}x"
        yield rf"\text{{lcm}}({gold},{gold})"


RULES: tuple[tuple[str, Callable[[str], Iterator[str]]], ...] = (
    ("sign", sign), ("operator", operator), ("digit", digit), ("scale", scale), ("unit", unit),
    ("wrapper", wrapper), ("suffix", suffix), ("dropped part", dropped_part), ("order", order),
    ("bracket", bracket), ("word", word), ("echo", echo),
)  # fmt: skip
