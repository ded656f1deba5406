r"""Operators that a problem asks to evaluate: an answer that repeats them has not been worked out.

Computer algebra evaluates ``\sum_{k=1}^{100} k``, so that an echo of the question would equal its value. An
answer may have such an operator only if the gold answer has it. Arithmetic such as ``2^{10}``, ``5!`` and
``\binom{5}{2}`` is a value.
"""

from __future__ import annotations

import re

from hacrl.tasks.math.structure import Structure

_OPERATORS = frozenset((
    "\\sum", "\\prod", "\\coprod", "\\int", "\\iint", "\\iiint", "\\oint", "\\lim", "\\limsup", "\\liminf",
    "\\max", "\\min", "\\sup", "\\inf", "\\arg", "\\argmax", "\\argmin", "\\gcd", "\\lcm", "\\det", "\\mod",
    "\\bmod", "\\pmod", "\\pod", "\\nabla", "\\Re", "\\Im", "\\operatorname", "\\bigcup", "\\bigcap",
))  # fmt: skip
_WORDS = frozenset(("gcd", "lcm", "max", "min", "mod", "det", "lim", "sum"))
_DERIVATIVE = re.compile(r"\\frac\{(?:d|\\partial ?)[^{}]*(?:\{[^{}]*\}[^{}]*)*\}\{(?:d|\\partial ?)[A-Za-z]")


def has_new_operator(gold: Structure, answer: Structure) -> bool:
    """Return whether the answer has an operator to evaluate that the gold answer does not have.

    The working before an equals sign may have any: ``\\sum_{k=1}^{3} k = 6`` gives the value.
    """
    return not _operators(answer) <= _operators(gold, every_side=True)


def is_working(structure: Structure) -> bool:
    """Return whether a side of an equation has an operator, whose value the next side gives."""
    return bool(_operators(structure))


def _operators(structure: Structure, every_side: bool = False) -> set[str]:
    if structure.kind == "equation" and not every_side:
        return _operators(structure.parts[-1])
    if structure.kind == "list" and structure.parts and not every_side:
        return set().union(*(_operators(part) for part in structure.parts))
    found = set(structure.tokens) & _OPERATORS
    if "\\begin{vmatrix}" in structure.text:
        found.add("determinant")
    found |= {token for token in structure.tokens if token[:6] == "\\text{" and token[6:-1] in _WORDS}
    return found | ({"derivative"} if _DERIVATIVE.search(structure.text) else set())
