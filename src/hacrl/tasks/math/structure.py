r"""Parse an answer's outer structure: list, tuple or interval, union, matrix, equation, or single value.

:mod:`hacrl.tasks.math.matching` compares structures part by part, so that only single values are left for
computer algebra. Computer algebra would read ``(1,2)`` as an interval and lose the order of list items.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hacrl.tasks.math.normalisation import depth_change, normalise, text_content, to_latex
from hacrl.tasks.math.numbers import has_thousands_separators

Kind = Literal["value", "list", "tuple", "union", "matrix", "equation"]

_BRACKETS = {"(": ")", "[": "]", "\\langle": "\\rangle", "\\{": "\\}"}
_EQUALS = ("=", "\\in", "\\approx")
# The left side of an equation: x, x_{1}, AB, f(x), \theta, \text{area}
NAME = re.compile(
    r"[A-Za-z]{1,3}'*(?:_\{[^{}]*\})?(?:\([A-Za-z0-9,]{1,9}\))?|\\[A-Za-z]+(?:_\{[^{}]*\})?|\\text\{[^}]*\}"
)
_INEQUALITY = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_LEFT_BRACKET = {"<": "(", "\\le": "["}
_RIGHT_BRACKET = {"<": ")", "\\le": "]"}


@dataclass(frozen=True, slots=True)
class Structure:
    r"""An answer or a part of one. ``brackets`` separates ``[0,1)`` from ``(0,1)``; sets have none."""

    kind: Kind
    text: str
    tokens: tuple[str, ...]
    parts: tuple[Structure, ...] = ()
    brackets: str = ""


def parse_structure(tokens: list[str]) -> Structure:
    """Return the structure of normalised tokens."""
    text = to_latex(tokens)
    if len(tokens) == 1 and (words := text_content(tokens[0])) is not None:
        return _parse_words(words)
    if not has_thousands_separators(text):
        items = _split(tokens, (",", ";"))
        if len(items) > 1:
            return Structure("list", text, tuple(tokens), tuple(parse_structure(item) for item in items))
    for separators, kind in ((_EQUALS, "equation"), (("\\cup",), "union")):
        items = _split(tokens, separators)
        if len(items) > 1:
            return Structure(kind, text, tuple(tokens), tuple(parse_structure(item) for item in items))  # type: ignore[arg-type]
    if len(tokens) > 1 and tokens[0] in _EQUALS:
        return parse_structure(tokens[1:])
    if bracketed := _parse_bracketed(tokens, text):
        return bracketed
    if "\\pm" in tokens:
        signs = (("+", "-"), ("-", "+"))
        both = [[{"\\pm": a, "\\mp": b}.get(token, token) for token in tokens] for a, b in signs]
        plus, minus = ([token for i, token in enumerate(side) if i or token != "+"] for side in both)
        return Structure("list", text, tuple(tokens), (parse_structure(plus), parse_structure(minus)))
    return Structure("value", text, tuple(tokens))


def inequality_to_interval(structure: Structure, other: Structure) -> Structure:
    r"""Return an inequality as an interval if the other answer is a tuple; else return it unchanged.

    ``1 < x \le 2`` becomes ``(1,2]`` and ``x > 3`` becomes ``(3,\infty)``.
    """
    if structure.kind != "value" or other.kind != "tuple":
        return structure
    pieces = [piece.strip() for piece in _INEQUALITY.split(structure.text)]  # bound, sign, name, sign, bound
    if len(pieces) not in (3, 5):
        return structure
    if pieces[1] in (">", "\\ge"):
        pieces = [_FLIPPED.get(piece, piece) for piece in reversed(pieces)]
    if len(pieces) == 3:
        pieces = ["-\\infty", "<", *pieces] if NAME.fullmatch(pieces[0]) else [*pieces, "<", "\\infty"]
    low, left, name, right, high = pieces
    if not NAME.fullmatch(name) or left not in _LEFT_BRACKET or right not in _RIGHT_BRACKET:
        return structure
    tokens = normalise(f"{_LEFT_BRACKET[left]}{low},{high}{_RIGHT_BRACKET[right]}")
    return parse_structure(tokens) if tokens else structure


def _parse_words(words: str) -> Structure:
    r"""Parse the words of an answer in ``\text{...}``: names stay text, ``(A)`` is A, numbers are values."""
    parts = [part for part in (piece.strip() for piece in words.split(",")) if part]
    if len(parts) > 1 and not has_thousands_separators(words):
        return Structure("list", words, (words,), tuple(_parse_words(part) for part in parts))
    words = words.rstrip(".") if words[-3:].lower() not in (".m.",) else words
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1].strip()
    if words and words.replace(".", "").replace(",", "").isdigit():
        return Structure("value", words, tuple(words))
    token = f"\\text{{{words}}}"
    return Structure("value", token, (token,))


def _split(tokens: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    """Split at separators outside all brackets and environments; drop empty runs."""
    runs: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth = max(0, depth + depth_change(token) + (token == "\\begin") - (token == "\\end"))
        if depth == 0 and token in separators:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run]


def _encloses(tokens: list[str]) -> bool:
    """Return whether the last token closes the bracket that the first token opens."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += depth_change(token)
        if depth <= 0:
            return at == len(tokens) - 1 and depth == 0
    return False


def _parse_bracketed(tokens: list[str], text: str) -> Structure | None:
    if len(tokens) > 8 and tokens[0] == "\\begin":
        return _parse_matrix(tokens, text)
    if len(tokens) < 3 or tokens[0] not in _BRACKETS or not _encloses(tokens):
        return None
    opening, closing, inner = tokens[0], tokens[-1], tokens[1:-1]
    items = _split(inner, (",", ";"))
    if opening == "\\{":
        if "|" in inner or ":" in inner or not items:
            return None  # matching compares {x | x > 0} as text
        structure = Structure("list", text, tuple(tokens), tuple(parse_structure(item) for item in items))
        return structure if len(items) > 1 else structure.parts[0]
    if len(items) > 1:
        parts = tuple(parse_structure(item) for item in items)
        brackets = "()" if opening == "\\langle" else opening + closing
        return Structure("tuple", text, tuple(tokens), parts, brackets)
    return parse_structure(inner) if (opening, closing) == ("(", ")") else None


def _parse_matrix(tokens: list[str], text: str) -> Structure | None:
    """Return rows of cells; None for other environments, several environments, and determinants."""
    name_end = tokens.index("}") if "}" in tokens else 0
    name = "".join(tokens[2:name_end])
    tail = ["\\end", "{", *tokens[2:name_end], "}"]
    body = tokens[name_end + 1 : -len(tail)]
    if name not in ("pmatrix", "bmatrix", "matrix") or tokens[-len(tail) :] != tail or "\\begin" in body:
        return None
    rows = []
    for row in _split(body, ("\\\\",)):
        cells = tuple(parse_structure(cell) for cell in _split(row, ("&",)))
        rows.append(Structure("tuple", to_latex(row), tuple(row), cells, "row"))
    return Structure("matrix", text, tuple(tokens), tuple(rows))
