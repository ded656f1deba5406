"""How a response carries its answer, and how a demonstration shows one.

When an answer to a question of reasoning-gym is right: more strictly than its own scorers say.

Some of them run the answer as a program: they hand it to ``eval``, or to sympy, which does. What a model
wrote is never run here: such answers are read first, and one that is more than a formula is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from hacrl.tasks.boxed import last_line
from hacrl.tasks.math.boxes import extract_answer


@dataclass(frozen=True)
class AnswerFormat:
    """One way to put an answer into a response and to get it out again."""

    prompt: str  # the default template
    shown: str  # a response with {answer} in it
    read: Callable[[str], str | None]

    def write(self, answer: str) -> str:
        """A response with this answer, as demonstrations show it."""
        return self.shown.replace("{answer}", answer.strip())


def whole_text(text: str) -> str | None:
    """The response itself."""
    return text.strip() or None


FORMATS: Mapping[str, AnswerFormat] = {
    "boxed": AnswerFormat(
        "{problem}\nGive the final answer within \\boxed{}.",
        r"The answer is \boxed{{answer}}.",
        extract_answer,
    ),
    "last_line": AnswerFormat(
        "{problem}\nGive the final answer alone on the last line.", "The answer is:\n{answer}", last_line
    ),
    "raw": AnswerFormat("{problem}\nGive the final answer and nothing else.", "{answer}", whole_text),
}


# They give part of a point for a right answer written as a Python list, which is not enough here anyway.
EVALUATED_AS_PYTHON: Mapping[str, str] = {
    "string_insertion": "reasoning_gym.algorithmic.string_insertion",
    "spiral_matrix": "reasoning_gym.algorithmic.spiral_matrix",
    "binary_matrix": "reasoning_gym.algorithmic.binary_matrix",
    "n_queens": "reasoning_gym.games.n_queens",
}
# Sums and products of given numbers, and no other way to get one (0x64, 1e2, 1.5, len("...")).
ARITHMETIC = ("countdown", "puzzle24")
# Not with "Integral" in it, which is the question again and passes for its answer.
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication")
_ARITHMETIC = re.compile(r"(?:[0-9]+|[-+()\s]|\*(?!\*)|/(?!/))+")
_FORMULA = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z]+[0-9]*|[-+*/^()\s])+")
_VARIABLE = re.compile(r"[A-Za-z][0-9]*")
_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs pi".split()  # noqa: SIM905
)


def is_correct(dataset: Any, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether the answer is worth a whole point: parts of one go to text that merely contains the answer."""
    _evaluate_nothing()
    kind = entry.get("metadata", {}).get("source_dataset", "")  # of a composite, the one the question is from
    if kind in ARITHMETIC and not _uses_the_numbers(answer, entry["metadata"]["numbers"]):
        return False
    if kind in FORMULAS and not _is_formula(answer):
        return False
    return float(dataset.score_answer(answer, dict(entry))) == 1.0


def is_answerable(entry: Mapping[str, Any]) -> bool:
    """Whether there is a right answer: what reasoning-gym gives for some integrals is no formula."""
    return entry.get("metadata", {}).get("source_dataset") not in FORMULAS or _is_formula(entry["answer"])


def _uses_the_numbers(answer: str, numbers: list[int]) -> bool:
    """Each once. reasoning-gym itself takes any four in ``puzzle24``: 6 * 4 * 1 * 1 would always do."""
    used = sorted(re.findall("[0-9]+", answer))
    return _ARITHMETIC.fullmatch(answer) is not None and used == sorted(map(str, numbers))


def _is_formula(answer: str) -> bool:
    names = re.findall("[A-Za-z]+[0-9]*", answer)
    known = all(name in _FUNCTIONS or _VARIABLE.fullmatch(name) for name in names)
    return known and _FORMULA.fullmatch(answer) is not None


@cache
def _evaluate_nothing() -> None:
    for module in EVALUATED_AS_PYTHON.values():
        import_module(module).eval = _refuse  # type: ignore[attr-defined]  # goes before the built-in one


def _refuse(answer: str) -> Any:
    raise ValueError("an answer is not run")
