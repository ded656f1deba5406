"""Text as a hostile model or data set might write it, and a judge of whether it could do anything."""

from __future__ import annotations

from unicodedata import category

# a window title, a cleared screen, colour, an 8-bit control sequence, mark-up and an emoji of rich, text that
# runs backwards, a joiner of no width, a tag that cannot be seen, a line that overwrites another, a deletion,
# separators of lines, cells, HTML, an image, code, emphasis, a formula, half a character
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
    """What in a text a terminal or an eye could be misled by."""
    return [one for one in text if one not in allowed and category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
