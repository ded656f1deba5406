"""Hostile text, as a model or data set might contain it, and a check for harmful characters."""

from __future__ import annotations

from unicodedata import category

# a window title, a cleared screen, colour, an 8-bit control sequence, mark-up and an emoji of rich, reversed
# text, a zero-width joiner, an invisible tag, a carriage return, backspace and delete, line separators, a
# table cell, HTML, an image, code, emphasis, a formula, half of a UTF-16 pair
HOSTILE = (
    "\x1b]0;pwned\x07",
    "\x1b[2J",
    "\x1b[31mred\x1b[0m",
    "\x9b2J",
    "[bold]x[/bold]",
    "[/]",
    ":smile:",
    "\u202eevil",
    "a\u200db",
    "\U000e0041",
    "first\rsecond",
    "one\ntwo",
    "\x08\x7f",
    "a\u2028b\u0085c",
    "a|b",
    "<script>alert(1)</script>",
    "![x](http://example.org/x.png)",
    "`code` *bold* \\| &lt;",
    "$\\frac{$",
    "\ud800",
)
EVERYTHING = " ".join(HOSTILE)


def controls(text: str, allowed: str = "\n\t") -> list[str]:
    """Return the characters that could mislead a terminal or a reader."""
    return [one for one in text if one not in allowed and category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
