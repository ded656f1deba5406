"""Score answers to reasoning-gym questions, more strictly than its own scorers do.

Some of its scorers run the answer as a program: they pass it to ``eval``, or to sympy, which calls ``eval``.
hacrl never runs what a model wrote. It first checks that such an answer is a plain formula, and otherwise
scores it as wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

# Scorers that call eval on the answer. They give part of a point for a correct answer written as a Python
# list; only a whole point counts here.
EVALUATED_AS_PYTHON: Mapping[str, str] = {
    "string_insertion": "reasoning_gym.algorithmic.string_insertion",
    "spiral_matrix": "reasoning_gym.algorithmic.spiral_matrix",
    "binary_matrix": "reasoning_gym.algorithmic.binary_matrix",
    "n_queens": "reasoning_gym.games.n_queens",
}
# Answers are sums and products of given numbers, not written in other ways (0x64, 1e2, 1.5, len("...")).
ARITHMETIC = ("countdown", "puzzle24")
# Answers are formulas. "Integral" is not allowed: it repeats the question, and the scorer accepts that.
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication")
_ARITHMETIC = re.compile(r"(?:[0-9]+|[-+()\s]|\*(?!\*)|/(?!/))+")
_FORMULA = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z]+[0-9]*|[-+*/^()\s])+")
_VARIABLE = re.compile(r"[A-Za-z][0-9]*")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs pi".split()  # noqa: SIM905
)


def is_correct(dataset: Any, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether the answer earns a whole point. Text that merely contains the answer earns less."""
    _disable_eval()
    kind = entry.get("metadata", {}).get("source_dataset", "")  # in a composite: the kind of this question
    if kind in ARITHMETIC and not _uses_the_numbers(answer, entry["metadata"]["numbers"]):
        return False
    if kind in FORMULAS and not _is_formula(answer):
        return False
    return float(dataset.score_answer(answer, dict(entry))) == 1.0


def is_answerable(entry: Mapping[str, Any]) -> bool:
    """Return whether a correct answer exists: reasoning-gym's answer to some integrals is no formula."""
    return entry.get("metadata", {}).get("source_dataset") not in FORMULAS or _is_formula(entry["answer"])


def _uses_the_numbers(answer: str, numbers: list[int]) -> bool:
    """Return whether the answer uses each number once. reasoning-gym accepts any four in ``puzzle24``."""
    used = sorted(re.findall("[0-9]+", answer))
    return _ARITHMETIC.fullmatch(answer) is not None and used == sorted(map(str, numbers))


def _is_formula(answer: str) -> bool:
    names = re.findall("[A-Za-z]+[0-9]*", answer)
    known = all(name in _FUNCTIONS or _VARIABLE.fullmatch(name) for name in names)
    return known and _FORMULA.fullmatch(answer) is not None


@cache
def _disable_eval() -> None:
    """Define ``eval`` in the scorers' modules, where it takes precedence over the built-in function."""
    for module in EVALUATED_AS_PYTHON.values():
        import_module(module).eval = _refuse_eval  # type: ignore[attr-defined]


def _refuse_eval(answer: str) -> Any:
    raise ValueError("an answer is never evaluated")
