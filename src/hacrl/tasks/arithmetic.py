"""The ``arithmetic`` task: two operations, from left to right. Few enough problems to enumerate.

A problem is ``(23+14)*2``, its prompt ``(23+14)*2:`` and its gold answer ``74``. A full response is
``23+14=37;37*2=74#74``: one equation per step, then ``#`` and the answer. The task enumerates all problems.
A hash of the problem's id decides order and split, so every process and every choice of ranges holds out the
same problems.

Terms have a wider range than factors, so only a tenth of all problems contains a product. By default the
task keeps at most ``per_pattern`` problems of each of the nine operator pairs; then half contain one.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from hacrl.errors import TaskError
from hacrl.types import Problem, Rollout, Verdict

OPERATORS = "+-*"
TEST_EVERY = 10  # one problem in ten is held out
MAX_EXPRESSIONS = 5_000_000  # all of them are enumerated
DEFAULT_PROMPT = "{problem}:"  # the format that the bundled agents were trained on
DEFAULT_PER_PATTERN = 1000  # about the number of problems of the rarer operator pairs with one product

_EXPRESSION = re.compile(r"\(([0-9]+)([-+*])([0-9]+)\)([-+*])([0-9]+)")
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")  # not \d, which also matches digits of other scripts

Range = tuple[int, int]  # both ends included


class Step(NamedTuple):
    """One operation, e.g. ``*2``."""

    operator: str
    operand: int

    def apply(self, value: int) -> int:
        """Return the correct result of this step applied to ``value``."""
        if self.operator == "+":
            return value + self.operand
        if self.operator == "-":
            return value - self.operand
        return value * self.operand


class Expression(NamedTuple):
    """A start value and two steps: ``Expression(23, Step("+", 14), Step("*", 2))`` is ``(23+14)*2``."""

    start: int
    first: Step
    second: Step

    @property
    def id(self) -> str:
        """The problem's id, e.g. ``(23+14)*2``."""
        (op1, by1), (op2, by2) = self.first, self.second
        return f"({self.start}{op1}{by1}){op2}{by2}"

    @property
    def pattern(self) -> str:
        """The operator pair, e.g. ``+*``."""
        return self.first.operator + self.second.operator

    def results(self) -> tuple[int, int]:
        """Return the correct intermediate and final value."""
        middle = self.first.apply(self.start)
        return middle, self.second.apply(middle)

    def write(self, middle: int, final: int) -> str:
        """Return the response with these results, correct or not: ``23+14=37;37*2=74#74``."""
        (op1, by1), (op2, by2) = self.first, self.second
        return f"{self.start}{op1}{by1}={middle};{middle}{op2}{by2}={final}#{final}"


class Ranges(NamedTuple):
    """The operands and results that occur; all ends included."""

    start: Range = (10, 39)
    term: Range = (2, 19)  # operands of + and -
    factor: Range = (2, 3)  # operands of *
    largest: int = 119  # every result, the intermediate one too, lies in 0..largest


def parse_expression(problem_id: str) -> Expression:
    """Parse an id such as ``(23+14)*2``."""
    match = _EXPRESSION.fullmatch(problem_id)
    if match is None:
        raise TaskError(f"problem_id: {problem_id!r} is not of the form (23+14)*2")
    start, op1, by1, op2, by2 = match.groups()
    return Expression(int(start), Step(op1, int(by1)), Step(op2, int(by2)))


def worked_solution(problem_id: str) -> str:
    """Return the correct response: ``worked_solution("(23+14)*2") == "23+14=37;37*2=74#74"``."""
    expression = parse_expression(problem_id)
    return expression.write(*expression.results())


def enumerate_expressions(ranges: Ranges) -> Iterator[Expression]:
    """Yield every expression within the ranges, in lexical order of its parts."""
    steps = [
        Step(operator, operand)
        for operator in OPERATORS
        for operand in _span(ranges.factor if operator == "*" else ranges.term)
    ]
    for start, first in product(_span(ranges.start), steps):
        if not 0 <= first.apply(start) <= ranges.largest:
            continue
        for second in steps:
            expression = Expression(start, first, second)
            if 0 <= expression.results()[1] <= ranges.largest:
                yield expression


class ArithmeticTask:
    """The task. Its options are those of :class:`Ranges`, the cap per operator pair, and the prompt.

    Models that were not trained on this notation need an instruction as the ``prompt``, e.g.
    ``"Compute {problem} step by step and end with # and the result, like #42."``
    ``per_pattern=None`` keeps all problems. The options never move a problem to the other split.
    """

    def __init__(
        self,
        *,
        start: Sequence[int] = (10, 39),
        term: Sequence[int] = (2, 19),
        factor: Sequence[int] = (2, 3),
        largest: int = 119,
        per_pattern: int | None = DEFAULT_PER_PATTERN,
        prompt: str = DEFAULT_PROMPT,
    ) -> None:
        self.name = "arithmetic"
        self.max_reward: float | None = 1.0
        self.independent_verdicts = True
        if "{problem}" not in prompt:
            raise TaskError(f"prompt={prompt!r}: must contain {{problem}}, where the expression goes")
        if largest < 0:
            raise TaskError(f"largest={largest!r}: results are never negative; give 0 or more")
        if per_pattern is not None and per_pattern < 1:
            raise TaskError(f"per_pattern={per_pattern!r}: give 1 or more, or None for all problems")
        pairs = (_parse_range("start", start), _parse_range("term", term), _parse_range("factor", factor))
        starts, terms, factors = (len(_span(ends)) for ends in pairs)
        if starts * (2 * terms + factors) ** 2 > MAX_EXPRESSIONS:
            raise TaskError(
                f"start={start}, term={term}, factor={factor}: too many problems; narrow the ranges"
            )
        self._train, self._test = _splits(Ranges(*pairs, largest), per_pattern, prompt)
        if not self._train or not self._test:
            raise TaskError(
                f"start={start}, term={term}, factor={factor}, largest={largest}, per_pattern={per_pattern}: "
                f"only {len(self._train)} train and {len(self._test)} test problems; widen the ranges"
            )

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order."""
        return [self.judge(rollout.problem, rollout.text) for rollout in rollouts]

    def close(self) -> None:
        """Do nothing: there are no worker processes."""

    def judge(self, problem: Problem, response: str) -> Verdict:
        """Compare the text after the last ``#``, which must be a plain integer, with the answer."""
        _, mark, answer = response.rpartition("#")
        if not mark or not _INTEGER.fullmatch(answer):
            return Verdict(0.0, "unparsable")
        # Compared as text: equal plain integers have equal digits, and int() refuses very long ones.
        return Verdict(1.0, "correct") if answer == problem.answer else Verdict(0.0, "wrong")


@lru_cache(maxsize=8)
def _splits(
    ranges: Ranges, per_pattern: int | None, prompt: str
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """Return train and test. Independent parts of one hash select, shuffle and split the problems."""
    hashed = sorted((_digest(expression.id), expression) for expression in enumerate_expressions(ranges))
    kept = _first_per_pattern(hashed, len(hashed) if per_pattern is None else per_pattern)
    # The smallest hashes of each pattern were kept, so the whole hash is no fair order: sort by its low bits.
    kept.sort(key=lambda entry: entry[0] % 2**64)
    train: list[Problem] = []
    test: list[Problem] = []
    for digest, expression in kept:
        problem = Problem(
            expression.id, prompt.replace("{problem}", expression.id), str(expression.results()[1])
        )
        (test if digest % TEST_EVERY == 0 else train).append(problem)
    return tuple(train), tuple(test)


def _first_per_pattern(hashed: list[tuple[int, Expression]], most: int) -> list[tuple[int, Expression]]:
    by_pattern: defaultdict[str, list[tuple[int, Expression]]] = defaultdict(list)
    for entry in hashed:
        by_pattern[entry[1].pattern].append(entry)
    return [entry for entries in by_pattern.values() for entry in entries[:most]]


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


def _span(ends: Range) -> range:
    return range(ends[0], ends[1] + 1)


def _parse_range(name: str, ends: Sequence[int]) -> Range:
    whole = isinstance(ends, Sequence) and all(type(end) is int for end in ends)
    if not whole or len(ends) != 2 or not 0 <= ends[0] <= ends[1]:
        raise TaskError(f"{name}={ends!r}: give two whole numbers, low and high, with 0 <= low <= high")
    return int(ends[0]), int(ends[1])
