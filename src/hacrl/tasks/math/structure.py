r"""Parse an answer's outer structure: list, tuple or interval, union, matrix, equation, or single value.

:mod:`hacrl.tasks.math.matching` compares structures part by part, so that only single values are left for
computer algebra. Computer algebra would read ``(1,2)`` as an interval and lose the order of list items.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hacrl.tasks.math.normalisation import depth_change, normalise, to_latex
from hacrl.tasks.math.numbers import has_thousands_separators

Kind = Literal["value", "list", "tuple", "union", "matrix", "equation"]

_BRACKETS = {"(": ")", "[": "]", "\\langle": "\\rangle", "\\{": "\\}"}
_EQUALS = ("=", "\\in", "\\approx")
_EMPTY_SET = "\\emptyset"
_REALS = ("\\mathbb{R}", "\\mathbb R")
_CONNECTIVES = {"\\land": "and", "\\lor": "or"}
_SEPARATORS = (",", ";", *_CONNECTIVES)
ELLIPSIS = "\\ldots"
_MATRICES = ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array")
_AROUND_MATRICES = {("(", ")"), ("[", "]")}
_LETTERS = (
    "alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    "|upsilon|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Upsilon|Phi|Psi|Omega|ell|hbar"
)
# The left side of an equation: x, x_{1}, AB, f(x), f^{-1}(x), \theta, \vec{v}, \overline{AB}, \angle ABC,
# \text{area}. Neither \pi, which has a value of its own, nor \sin or \not.
NAME = re.compile(
    r"[A-Za-z]{1,3}'*(?:_\{[^{}]*\})?(?:\([A-Za-z0-9,]{1,9}\))?|[fgh]\^\{-1\}\([A-Za-z0-9]{1,9}\)"
    rf"|\\(?:{_LETTERS})(?:_\{{[^{{}}]*\}})?|\\(?:mathbf|vec)\{{[A-Za-z]\}}|\\overline\{{[A-Z]{{2}}\}}"
    r"|m?\\angle ?[A-Z]{1,3}|\\text\{[^}]*\}"
)
_INEQUALITY = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z]))")
_INEQUALITY_SIGNS = frozenset(("<", ">", "\\le", "\\ge", "\\ne"))
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_LEFT_BRACKET = {"<": "(", "\\le": "["}
_RIGHT_BRACKET = {"<": ")", "\\le": "]"}


@dataclass(frozen=True, slots=True)
class Structure:
    r"""An answer or a part of one.

    ``brackets`` separates ``[0,1)`` from ``(0,1)``; sets have none. In a list of inequalities it is the
    word between them: ``x<1`` and ``x>3`` is not ``x<1`` or ``x>3``.
    """

    kind: Kind
    text: str
    tokens: tuple[str, ...]
    parts: tuple[Structure, ...] = ()
    brackets: str = ""


def parse_structure(tokens: list[str]) -> Structure:
    """Return the structure of normalised tokens."""
    if not tokens:
        return Structure("value", "", ())
    if tokens == ["\\{", "\\}"]:
        tokens = [_EMPTY_SET]
    text = to_latex(tokens)
    if text in _REALS:
        return parse_structure(["(", "-", "\\infty", ",", "\\infty", ")"])
    if not has_thousands_separators(text):
        items = _split(tokens, _SEPARATORS)
        if len(items) > 1:
            parts = tuple(parse_structure(item) for item in items)
            return Structure("list", text, tuple(tokens), parts, _connective(tokens, parts))
    for separators, kind in ((_EQUALS, "equation"), (("\\cup",), "union")):
        items = _split(tokens, separators)
        if len(items) > 1 and all(items):
            return Structure(kind, text, tuple(tokens), tuple(parse_structure(item) for item in items))  # type: ignore[arg-type]
    if len(tokens) > 1 and tokens[0] in _EQUALS and tokens[1] not in _EQUALS:
        return parse_structure(tokens[1:])
    if bracketed := _parse_bracketed(tokens, text):
        return bracketed
    if tokens.count("\\pm") == 1:  # several may be meant to go together, or not
        signs = (("+", "-"), ("-", "+"))
        both = [[{"\\pm": a, "\\mp": b}.get(token, token) for token in tokens] for a, b in signs]
        plus, minus = ([token for i, token in enumerate(side) if i or token != "+"] for side in both)
        return Structure("list", text, tuple(tokens), (parse_structure(plus), parse_structure(minus)))
    return Structure("value", text, tuple(tokens))


def is_inequality(structure: Structure) -> bool:
    """Return whether a value has an inequality sign."""
    return structure.kind == "value" and not _INEQUALITY_SIGNS.isdisjoint(structure.tokens)


def inequality_to_interval(structure: Structure, other: Structure) -> Structure:
    r"""Return an inequality as an interval if the other answer is a tuple; else return it unchanged.

    ``1 < x \le 2`` becomes ``(1,2]`` and ``x > 3`` becomes ``(3,\infty)``.
    """
    if not is_inequality(structure) or other.kind != "tuple":
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


def _connective(tokens: list[str], parts: tuple[Structure, ...]) -> str:
    """Return the word between inequalities and words; empty for values, where ``and`` is ``or``: x = 1, 2."""
    if any("\\text{" in part.text for part in parts) and not any(token.isdigit() for token in tokens):
        return "or" if "\\lor" in tokens else ""
    if not any(is_inequality(part) for part in parts):
        return ""
    return " ".join(sorted({word for token, word in _CONNECTIVES.items() if token in tokens}))


def _split(tokens: list[str], separators: tuple[str, ...]) -> list[list[str]]:
    """Split at separators outside all brackets and environments.

    A run between two separators may be empty: ``1,,2`` has three parts, but ``1, and 2`` has two.
    """
    runs: list[list[str]] = [[]]
    depth, previous = 0, ""
    for token in tokens:
        depth = max(0, depth + depth_change(token) + (token == "\\begin") - (token == "\\end"))
        if depth == 0 and token in separators:
            if not (token in _CONNECTIVES and previous in (",", ";")):
                runs.append([])
        else:
            runs[-1].append(token)
        previous = token
    return runs


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
    if (tokens[0], tokens[-1]) in _AROUND_MATRICES and tokens[1:2] == ["\\begin"] and _encloses(tokens):
        return _parse_matrix(tokens[1:-1], text)
    if len(tokens) < 3 or tokens[0] not in _BRACKETS or not _encloses(tokens):
        return None
    opening, closing, inner = tokens[0], tokens[-1], tokens[1:-1]
    items = _split(inner, (",", ";"))
    if opening == "\\{":
        if "|" in inner or ":" in inner or not items:
            return None  # matching compares {x | x > 0} as text
        parts = tuple(parse_structure(item) for item in items)
        if len(items) > 1:
            return Structure("list", text, tuple(tokens), parts)
        # {5} is an answer's way to say 5, but the set of a set is not that set
        return parts[0] if parts[0].kind != "list" and parts[0].text != _EMPTY_SET else None
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
    if name not in _MATRICES or tokens[-len(tail) :] != tail or "\\begin" in body:
        return None
    if name == "array":  # \begin{array}{cc}
        if body[:1] != ["{"] or "}" not in body or not set(body[1 : body.index("}")]) <= set("lcr"):
            return None
        body = body[body.index("}") + 1 :]
    lines = _split(body, ("\\\\",))
    if not lines[-1]:
        lines.pop()
    rows = []
    for row in lines:
        cells = tuple(parse_structure(cell) for cell in _split(row, ("&",)))
        rows.append(Structure("tuple", to_latex(row), tuple(row), cells, "row"))
    return Structure("matrix", text, tuple(tokens), tuple(rows)) if rows else None
