r"""Read an inequality as an interval: ``1 < x \le 2`` is ``(1,2]``, ``x > 3`` is ``(3,\infty)``."""

from __future__ import annotations

import re

from hacrl.tasks.math.latex import tidy
from hacrl.tasks.math.shapes import Shape, read_shape

# What an answer may be called: x, x_{1}, AB, f(x), \theta, \text{area}
NAME = re.compile(
    r"[A-Za-z]{1,3}'*(?:_\{[^{}]*\})?(?:\([A-Za-z0-9,]{1,9}\))?|\\[A-Za-z]+(?:_\{[^{}]*\})?|\\text\{[^}]*\}"
)
_SIGN = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))")
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_LEFT = {"<": "(", "\\le": "["}
_RIGHT = {"<": ")", "\\le": "]"}


def as_interval(shape: Shape, other: Shape) -> Shape:
    """The inequality as an interval if the other side is one; else the shape itself."""
    if shape.kind != "value" or other.kind != "tuple":
        return shape
    pieces = [piece.strip() for piece in _SIGN.split(shape.text)]  # bound, sign, name, sign, bound
    if len(pieces) not in (3, 5):
        return shape
    if pieces[1] in (">", "\\ge"):
        pieces = [_FLIPPED.get(piece, piece) for piece in reversed(pieces)]
    if len(pieces) == 3:
        pieces = ["-\\infty", "<", *pieces] if NAME.fullmatch(pieces[0]) else [*pieces, "<", "\\infty"]
    low, left, name, right, high = pieces
    if not NAME.fullmatch(name) or left not in _LEFT or right not in _RIGHT:
        return shape
    tokens = tidy(f"{_LEFT[left]}{low},{high}{_RIGHT[right]}")
    return read_shape(tokens) if tokens else shape
