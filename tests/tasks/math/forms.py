"""Equivalent answers made from a gold answer by rewriting its text; no code of the verifier."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

INTEGER = re.compile(r"-?[0-9]+")
DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
E_NOTATION = re.compile(r"(-?[0-9.]+)e(-?[0-9]+)")
FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
PERCENT = re.compile(r"(-?[0-9.]+) ?\\?%")
MONEY = re.compile(r"\\\$ ?(-?[0-9.,\\!]+)")
DEGREES = re.compile(r"(.*[0-9])\s*\^\{?\\circ\}?")
UNIT = re.compile(r"(.*?[0-9}])(\\[,;: ])? *\\(?:text|mbox)\s*\{([^{}]*)\}(\^\{?([23])\}?)?\.?", re.DOTALL)
BASE = re.compile(r"(-?[0-9.A]+)_\{?([0-9]+)\}?\.?")
RATIO = re.compile(r"([0-9]+) ?: ?([0-9]+)")
MATRIX = re.compile(r"(\\begin\{[pb]matrix\})(.*)(\\end\{[pb]matrix\})", re.DOTALL)
_BARE_FRACTION = re.compile(r"\\frac ?([0-9])([0-9])(?![0-9])")
INTERVAL = re.compile(r"(\(|\[) ?(-?[0-9]+|-\\infty), ?(-?[0-9]+|\\infty) ?(\)|\])")


def number_of(gold: str) -> Fraction | None:
    """The value of an integer, decimal, fraction or number in e-notation."""
    if INTEGER.fullmatch(gold) or DECIMAL.fullmatch(gold):
        return Fraction(gold)
    if found := E_NOTATION.fullmatch(gold):
        return Fraction(found.group(1)) * Fraction(10) ** int(found.group(2))
    if found := FRACTION.fullmatch(_BARE_FRACTION.sub(r"\\frac{\1}{\2}", gold.replace("\\dfrac", "\\frac"))):
        return Fraction(f"{found.group(1)}{found.group(2)}".replace("--", "")) / int(found.group(3))
    return None


def items_of(gold: str) -> tuple[str, list[str], str] | None:
    """Opening, items and closing of a list, set, tuple or interval; None for other answers."""
    text = gold.strip()
    opening = closing = ""
    for left, right in (("\\left(", "\\right)"), ("\\left[", "\\right]"), ("\\left(", "\\right]"),
                        ("\\left[", "\\right)"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"),
                        ("\\{", "\\}")):  # fmt: skip
        if text.startswith(left) and text.endswith(right):
            opening, closing, text = left, right, text[len(left) : -len(right)]
            break
    items, depth = [""], 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if character == "," and depth == 0 and text[at - 1 : at] != "\\" and text[at + 1 : at + 2] != "!":
            items.append("")
        else:
            items[-1] += character
    items = [item.strip().removeprefix("\\,").strip() for item in items]
    grouped = re.fullmatch(r"-?(\\\$)?[0-9]{1,3}(,(\\!)?[0-9]{3})+", text) is not None
    if len(items) < 2 or (not opening and grouped) or re.search(r"\\text|\\mbox|\\begin|where|\\!", text):
        return None
    return opening, items, closing


def equivalent(gold: str) -> dict[str, str]:
    """Box contents that mean the gold answer, by the name of the rewriting."""
    forms = {"as is": gold, "spaces": f"  {gold} ", "full stop": f"{gold}."}
    if "$" not in gold:
        forms["dollars"] = f"${gold}$"
    if r"\frac" in gold:
        forms["dfrac"] = gold.replace(r"\frac", r"\dfrac")
        forms["tfrac"] = gold.replace(r"\frac", r"\tfrac")
    if r"\left" not in gold and "(" in gold:
        forms["left right"] = re.sub(r"([)\]])", r"\\right\1", re.sub(r"([(\[])", r"\\left\1", gold))
    if r"\left" in gold:
        forms["no left right"] = re.sub(r"\\(?:left|right)(?=[()\[\]|\\{}])", "", gold)
    if r"\text{" in gold:
        forms["mbox"] = gold.replace(r"\text{", r"\mbox{")
    forms |= _of_numbers(gold)
    return forms | _of_units(gold) | _of_structures(gold) | _of_expressions(gold)


def _of_units(gold: str) -> dict[str, str]:
    if found := PERCENT.fullmatch(gold):
        value = Fraction(found.group(1))
        return {
            "percent in words": rf"{found.group(1)}\text{{ percent}}",
            "percent as decimal": f"{float(value / 100):.10g}",
            "percent escaped": f"{found.group(1)}\\%",
        }
    if found := MONEY.fullmatch(gold):
        return {
            "sign dropped": found.group(1),
            "dollars": rf"{found.group(1)}\text{{ dollars}}",
            "bare dollars": f"{found.group(1)} dollars",
            "text sign": rf"\text{{\$}}{found.group(1)}",
        }
    if (found := DEGREES.fullmatch(gold)) and not re.search(r"\\(?:sin|cos|tan)", gold):
        return {
            "degrees dropped": found.group(1),
            "degrees in words": rf"{found.group(1)}\text{{ degrees}}",
            "braced circ": rf"{found.group(1)}^{{\circ}}",
        }
    if (found := UNIT.fullmatch(gold)) and re.search("[0-9]", found.group(1)):
        value, _, words, power, exponent = found.groups()
        words = words.strip()
        if words in ("and", "or") or words.endswith("m."):
            return {}
        return {
            "unit dropped": value,
            "unit in mathrm": rf"{value}\,\mathrm{{{words}}}{power or ''}",
            "unit in textbf": rf"{value}~\textbf{{{words}}}{power or ''}",
            "unit after a space": rf"{value} \ \text{{{words}}}{power or ''}",
            "braced power": rf"{value}\text{{ {words}}}^{{{exponent}}}" if exponent else gold,
        }
    return {}


def _of_structures(gold: str) -> dict[str, str]:
    forms: dict[str, str] = {}
    if found := items_of(gold):
        opening, items, closing = found
        forms["wide"] = f"{opening} {' ,  '.join(items)} {closing}"
        if opening in ("", "\\{"):
            forms["other order"] = ", ".join(reversed(items))
            forms["set"] = rf"\left\{{ {', '.join(items)} \right\}}"
            forms["and"] = rf"{', '.join(items[:-1])}\text{{ and }}{items[-1]}"
            if not re.search("[=A-Za-df-hj-z]", re.sub(r"\\[a-z]+", "", gold)):
                forms["or, named"] = " or ".join(f"x={item}" for item in reversed(items))
    if "\\cup" in gold:
        forms["union in other order"] = r" \cup ".join(reversed(gold.split("\\cup")))
    if found := MATRIX.fullmatch(gold):
        body = found.group(2)
        columns = "c" * (body.partition("\\\\")[0].count("&") + 1)
        forms |= {
            "brackets": rf"\begin{{bmatrix}}{body}\end{{bmatrix}}",
            "array": rf"\left(\begin{{array}}{{{columns}}}{body}\end{{array}}\right)",
            "array in brackets": rf"\left[\begin{{array}}{{{columns}}}{body}\end{{array}}\right]",
            "last row ended": rf"\begin{{pmatrix}}{body} \\ \end{{pmatrix}}",
        }
    if (found := INTERVAL.fullmatch(gold)) and ("]" in gold or "[" in gold or "infty" in gold):
        left, low, high, right = found.groups()
        below, above = r"\le" if left == "[" else "<", r"\le" if right == "]" else "<"
        pieces = (
            ([low, below] if "infty" not in low else [])
            + ["x"]
            + ([above, high] if "infty" not in high else [])
        )
        if len(pieces) > 1:
            forms["inequality"] = " ".join(pieces)
            flip = {"<": ">", r"\le": r"\ge"}
            forms["inequality reversed"] = " ".join(flip.get(piece, piece) for piece in reversed(pieces))
        forms["membership"] = rf"x \in {gold}"
    if found := BASE.fullmatch(gold):
        forms["base in braces"] = f"{found.group(1)}_{{{found.group(2)}}}"
    if found := RATIO.fullmatch(gold):
        forms["ratio with spaces"] = f"{found.group(1)} : {found.group(2)}"
    return forms


def _of_expressions(gold: str) -> dict[str, str]:
    if re.search(
        r"\\text|\\mbox|\\begin|[=,:<>%$'_]|\\le|\\ge|\\in\b|\\cup|\\circ|\\infty|overline|\\pm|\\emptyset",
        gold,
    ):
        return {}
    if gold.endswith("."):
        return {}
    forms = {"parentheses": f"({gold})", "displaystyle": rf"\displaystyle {gold}"}
    if not E_NOTATION.fullmatch(gold):
        forms["one more and one less"] = f"{gold}+1-1"
    if number_of(gold) is None and not E_NOTATION.fullmatch(gold):
        forms["times one"] = rf"1\cdot\left({gold}\right)"
        forms["twice its half"] = rf"\frac{{2({gold})}}{{2}}"
        if re.search(r"\\sqrt\{[0-9]+\}", gold) and not re.search(r"[a-z] ?\\sqrt", gold):
            forms["root as power"] = re.sub(r"\\sqrt\{([0-9]+)\}", r"(\1)^{1/2}", gold)
        forms["spaced"] = re.sub(r" ?([-+]) ?", r" \1 \\, ", gold)
    return forms


def _of_numbers(gold: str) -> dict[str, str]:
    if INTEGER.fullmatch(gold):
        value = int(gold)
        forms = {
            "zeros": f"{gold}.00",
            "unit": rf"{gold}\text{{ cm}}",
            "mathrm": rf"{gold} \mathrm{{~kg}}",
            "degrees": rf"{gold}^\circ",
            "money": rf"\${gold}",
            "assigned": f"x = {gold}",
            "half of twice": rf"\frac{{{2 * value}}}{{2}}",
            "percent": rf"{gold}\%",
            "words": f"{gold} apples",
            "phrase": rf"{gold}\text{{ cups of tea}}",
            "bold": rf"\mathbf{{{gold}}}",
            "in text": rf"\text{{{gold}}}",
            "in textbf": rf"\textbf{{{gold}}}",
            "name in words": rf"\text{{Total}} = {gold}",
            "unit with power": rf"{gold}\text{{ square feet}}",
            "speed": rf"{gold}\,\mathrm{{km/h}}",
        }
        if abs(value) >= 1000:
            grouped = f"{value:,}"
            forms |= {
                "commas": grouped,
                "braced commas": grouped.replace(",", "{,}"),
                "thin commas": grouped.replace(",", r",\!"),
                "thin spaces": grouped.replace(",", r"\,"),
                "commas and unit": rf"{grouped}\text{{ cm}}",
                "commas and money": rf"\${grouped}",
            }
        return forms
    if DECIMAL.fullmatch(gold):
        value = Fraction(gold)
        return {
            "zeros": f"{gold}00",
            "fraction": rf"\frac{{{value.numerator}}}{{{value.denominator}}}",
            "unit": rf"{gold}\text{{ m}}",
        }
    if found := E_NOTATION.fullmatch(gold):
        mantissa, exponent = found.groups()
        return {
            "times": rf"{mantissa} \times 10^{{{exponent}}}",
            "cdot": rf"{mantissa}\cdot10^{{{exponent}}}",
            "capital": f"{mantissa}E{exponent}",
            "unit": rf"{mantissa} \times 10^{{{exponent}}} \mathrm{{~erg}}",
        }
    if found := FRACTION.fullmatch(gold):
        sign, above, below = found.groups()
        value = Fraction(int(f"{sign}{above}".replace("--", "")), int(below))
        forms = {
            "slash": f"{value.numerator}/{value.denominator}",
            "doubled": rf"\frac{{{2 * value.numerator}}}{{{2 * value.denominator}}}",
        }
        forms |= _mixed_and_decimal(value)
        if len(below) == 1 and len(above) == 1:
            forms["no braces"] = rf"{sign}\frac{above}{below}"
        return forms
    return {}


def _mixed_and_decimal(value: Fraction) -> dict[str, str]:
    """The value as a mixed number, if it is more than one, and as a decimal, if that ends."""
    forms: dict[str, str] = {}
    whole, rest = divmod(abs(value), 1)
    sign = "-" if value < 0 else ""
    if whole and rest:
        forms["mixed"] = rf"{sign}{whole}\frac{{{rest.numerator}}}{{{rest.denominator}}}"
        forms["mixed with slash"] = rf"{sign}{whole} {rest.numerator}/{rest.denominator}"
    places = next((n for n in range(1, 9) if 10**n % value.denominator == 0), None)
    if places is not None:
        forms["decimal"] = f"{sign}{Decimal(abs(value).numerator) / Decimal(value.denominator)}"
    return forms
