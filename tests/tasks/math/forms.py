"""Equivalent and wrong answers made from a gold answer by rewriting its text; no code of the verifier."""

from __future__ import annotations

import re
from fractions import Fraction

INTEGER = re.compile(r"-?[0-9]+")
DECIMAL = re.compile(r"-?[0-9]*\.[0-9]+")
E_NOTATION = re.compile(r"(-?[0-9.]+)e(-?[0-9]+)")
FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
TEXT = re.compile(r"\\(?:text|mbox)\s*\{[^{}]*\}")
BARE_LIST = re.compile(r"[^()\[\]{}\\=a-z]+(?:, ?[^()\[\]{}\\=a-z]+)+")  # of plain numbers
PAIR = re.compile(r"(?:\\left)? ?\(([^(),\\]+),([^(),\\]+)(?:\\right)? ?\)")


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
    if BARE_LIST.fullmatch(gold) and ", " in gold:
        forms["other order"] = ", ".join(reversed(gold.split(", ")))
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
        }
        if abs(value) >= 1000:
            grouped = f"{value:,}"
            forms |= {
                "commas": grouped,
                "braced commas": grouped.replace(",", "{,}"),
                "thin commas": grouped.replace(",", r",\!"),
                "thin spaces": grouped.replace(",", r"\,"),
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
        if len(below) == 1 and len(above) == 1:
            forms["no braces"] = rf"{sign}\frac{above}{below}"
        return forms
    return {}


def wrong(gold: str) -> dict[str, str]:
    """Box contents that mean something else, by the name of the change."""
    if INTEGER.fullmatch(gold) or DECIMAL.fullmatch(gold):
        value = Fraction(gold)
        forms = {
            "plus one": str(float(value) + 1) if "." in gold else str(int(gold) + 1),
            "list": f"{gold},{gold}",
        }
        if value:
            forms |= {
                "letter": f"{gold}t",
                "negated": f"-({gold})",
                "tenfold": f"{gold}\\cdot 10",
                "nearly": f"{gold}.001" if "." not in gold else f"{gold}1",
            }
        return forms
    if found := E_NOTATION.fullmatch(gold):
        mantissa, exponent = found.groups()
        return {
            "exponent": f"{mantissa}e{int(exponent) + 1}",
            "mantissa": f"{mantissa}1e{exponent}" if "." in mantissa else f"{mantissa}.1e{exponent}",
        }
    if found := FRACTION.fullmatch(gold):
        sign, above, below = found.groups()
        return {
            "plus one": rf"{sign}\frac{{{int(above) + int(below) * 2 + 1}}}{{{below}}}",
            "minus": rf"-({gold})",
        }
    if TEXT.fullmatch(gold):
        return {"other word": r"\text{something else}"}
    if TEXT.search(gold) or "=" in gold or r"\begin" in gold or r"\cup" in gold or r"\in" in gold:
        return (
            {"first number": re.sub(r"[0-9]+", lambda m: str(int(m.group()) + 1), gold, count=1)}
            if re.search("[0-9]", gold)
            else {}
        )
    if found := PAIR.fullmatch(gold):
        one, other = (part.strip() for part in found.groups())
        return {"swapped": f"({other},{one})", "closed": f"[{one},{other}]"} if one != other else {}
    if "," in gold:
        return {"one more": f"{gold}, 987"}
    return {"plus one": f"{gold}+1", "times seven": rf"7\cdot({gold})", "letter": f"({gold})w"}
