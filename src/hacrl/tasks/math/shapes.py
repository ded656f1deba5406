r"""See an answer's outer shape: a list, a tuple or interval, a union, a matrix, an equation, a single value.

Shapes are compared here part by part, so that only single values are left for computer algebra, which takes
``(1,2)`` for an interval and forgets the order of what it puts into sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hacrl.tasks.math.latex import nesting, text_content, untidy
from hacrl.tasks.math.numbers import is_grouped

Kind = Literal["value", "list", "tuple", "union", "matrix", "equation"]

_BRACKETS = {"(": ")", "[": "]", "\\langle": "\\rangle", "\\{": "\\}"}
_EQUALS = ("=", "\\in", "\\approx")


@dataclass(frozen=True, slots=True)
class Shape:
    r"""A part of an answer. ``brackets`` tells ``[0,1)`` from ``(0,1)``; sets and bare lists have none."""

    kind: Kind
    text: str
    tokens: tuple[str, ...]
    parts: tuple[Shape, ...] = ()
    brackets: str = ""


def read_shape(tokens: list[str]) -> Shape:
    """The shape of tidied tokens."""
    text = untidy(tokens)
    if len(tokens) == 1 and (words := text_content(tokens[0])) is not None:
        return _read_words(words)
    if not is_grouped(text):
        items = _split(tokens, (",", ";"))
        if len(items) > 1:
            return Shape("list", text, tuple(tokens), tuple(read_shape(item) for item in items))
    for separators, kind in ((_EQUALS, "equation"), (("\\cup",), "union")):
        items = _split(tokens, separators)
        if len(items) > 1:
            return Shape(kind, text, tuple(tokens), tuple(read_shape(item) for item in items))  # type: ignore[arg-type]
    if tokens and tokens[0] in _EQUALS:
        return read_shape(tokens[1:])
    if bracketed := _read_bracketed(tokens, text):
        return bracketed
    if "\\pm" in tokens:
        both = [[{"\\pm": a, "\\mp": b}.get(t, t) for t in tokens] for a, b in (("+", "-"), ("-", "+"))]
        plus, minus = ([t for i, t in enumerate(one) if i or t != "+"] for one in both)
        return Shape("list", text, tuple(tokens), (read_shape(plus), read_shape(minus)))
    return Shape("value", text, tuple(tokens))


def _read_words(words: str) -> Shape:
    r"""A whole answer in ``\text{...}``: names and choices stay text; ``(A)`` is A; numbers are numbers."""
    parts = [part for part in (piece.strip() for piece in words.split(",")) if part]
    if len(parts) > 1 and not is_grouped(words):
        return Shape("list", words, (words,), tuple(_read_words(part) for part in parts))
    words = words.rstrip(".") if words[-3:].lower() not in (".m.",) else words
    if len(words) > 2 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1].strip()
    if words and words.replace(".", "").replace(",", "").isdigit():
        return Shape("value", words, tuple(words))
    token = f"\\text{{{words}}}"
    return Shape("value", token, (token,))


def _split(tokens: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    """The runs between separators outside all brackets and environments, without empty ones."""
    runs: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth = max(0, depth + nesting(token) + (token == "\\begin") - (token == "\\end"))
        if depth == 0 and token in separators:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run]


def _encloses(tokens: list[str]) -> bool:
    """Whether the first token's bracket is closed by the last token."""
    depth = 0
    for at, token in enumerate(tokens):
        depth += nesting(token)
        if depth <= 0:
            return at == len(tokens) - 1 and depth == 0
    return False


def _read_bracketed(tokens: list[str], text: str) -> Shape | None:
    if len(tokens) > 8 and tokens[0] == "\\begin":
        return _read_matrix(tokens, text)
    if len(tokens) < 3 or tokens[0] not in _BRACKETS or not _encloses(tokens):
        return None
    opening, closing, inner = tokens[0], tokens[-1], tokens[1:-1]
    items = _split(inner, (",", ";"))
    if opening == "\\{":
        if "|" in inner or ":" in inner or not items:
            return None  # {x | x > 0} is compared as text
        shape = Shape("list", text, tuple(tokens), tuple(read_shape(item) for item in items))
        return shape if len(items) > 1 else shape.parts[0]
    if len(items) > 1:
        parts = tuple(read_shape(item) for item in items)
        brackets = "()" if opening == "\\langle" else opening + closing
        return Shape("tuple", text, tuple(tokens), parts, brackets)
    return read_shape(inner) if (opening, closing) == ("(", ")") else None


def _read_matrix(tokens: list[str], text: str) -> Shape | None:
    """Rows of cells; None for other environments, several in a row, and determinants."""
    name_end = tokens.index("}") if "}" in tokens else 0
    name = "".join(tokens[2:name_end])
    tail = ["\\end", "{", *tokens[2:name_end], "}"]
    body = tokens[name_end + 1 : -len(tail)]
    if name not in ("pmatrix", "bmatrix", "matrix") or tokens[-len(tail) :] != tail or "\\begin" in body:
        return None
    rows = []
    for row in _split(body, ("\\\\",)):
        cells = tuple(read_shape(cell) for cell in _split(row, ("&",)))
        rows.append(Shape("tuple", untidy(row), tuple(row), cells, "row"))
    return Shape("matrix", text, tuple(tokens), tuple(rows))
