"""Train and test that never share a question, in a fixed shuffled order.

A question is its text: in Unicode NFC, white space collapsed, case kept. A hash of that text, never a
position or a random stream, decides order and split, so every process and every machine agrees.

Which problems are asked in which step: a function of the seed and the step alone.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hacrl.errors import TaskError
from hacrl.seeding import derive_seed
from hacrl.types import Problem

DEFAULT_TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem before splitting. ``variant`` tells rows apart that ask the same but are judged otherwise."""

    question: str
    problem: Problem
    variant: str = ""


@dataclass(frozen=True)
class Splits:
    """Disjoint problems, and sentences on what was left out."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


def question_key(text: str) -> str:
    """The question's identity."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def question_hash(*parts: str) -> int:
    """A 256-bit hash: of the key alone it decides the split, of key and variant the order."""
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).digest())


def question_id(text: str) -> str:
    """A short id that equal questions share."""
    return f"{question_hash(question_key(text)) >> 192:016x}"


def make_splits(
    train: Sequence[Candidate],
    test: Sequence[Candidate] | None,
    *,
    test_share: float = 0.0,
    shown: Iterable[str] = (),
    limit: int | None = None,
) -> Splits:
    """Leave out repeats, questions that are ``shown`` in the prompt, and test questions found in train.

    Without a test set, about ``test_share`` of the training questions is held out. ``limit`` keeps that many
    training problems.
    """
    notes: list[str] = []
    kept = _once(train, "training", notes)
    if test is None:
        held = [one for one in kept if _share(one) < test_share]
        kept = [one for one in kept if _share(one) >= test_share]
    else:
        held = _once(test, "test", notes)
        asked = {question_key(one.question) for one in held}
        before = len(kept)
        kept = [one for one in kept if question_key(one.question) not in asked]
        if len(kept) < before:
            notes.append(_removed(before - len(kept), "training", "in the test set"))
    demonstrated = {question_key(text) for text in shown}
    kept = _without(kept, demonstrated, "training", notes)
    held = _without(held, demonstrated, "test", notes)
    if not kept:
        raise TaskError("train: no training question is left" + "".join(f"; {note}" for note in notes))
    if test is None and test_share and not held:
        raise TaskError(
            f"test_share={test_share}: no question of {len(kept)} is held out; give a larger share, a test "
            "set, or 0 for none"
        )
    _check_ids([*kept, *held])
    if limit is not None and limit < len(kept):
        notes.append(f"{limit} of {len(kept)} training questions are used (limit)")
    return Splits(_ordered(kept)[:limit], _ordered(held), tuple(notes))


def check_share(test_share: float | None, test: object | None, default: float) -> float:
    """The share to hold out; it makes no sense beside a test set."""
    if test_share is None:
        return 0.0 if test is not None else default
    if test is not None:
        raise TaskError(f"test_share={test_share}: there is a test set already; leave one of the two out")
    if isinstance(test_share, bool) or not isinstance(test_share, int | float) or not 0 <= test_share < 1:
        raise TaskError(f"test_share={test_share!r}: must be at least 0 and less than 1")
    return float(test_share)


def check_count(name: str, value: int | None, least: int = 1) -> None:
    """Refuse a count that is not a whole number of at least ``least``; None is no limit."""
    if value is not None and (type(value) is not int or value < least):
        raise TaskError(f"{name}={value!r}: must be a whole number of at least {least}")


def count_of(count: int, noun: str) -> str:
    """``1 question``, ``2 questions``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _once(candidates: Sequence[Candidate], which: str, notes: list[str]) -> list[Candidate]:
    first: dict[tuple[str, str], Candidate] = {}
    differing = 0
    for one in candidates:
        seen = first.setdefault((question_key(one.question), one.variant), one)
        differing += seen.problem.answer != one.problem.answer
    repeated = len(candidates) - len(first)
    if repeated:
        but = f", {differing} of them with another answer than the one kept" if differing else ""
        notes.append(f"{count_of(repeated, f'repeated {which} question')} left out{but}")
    return list(first.values())


def _without(candidates: list[Candidate], keys: set[str], which: str, notes: list[str]) -> list[Candidate]:
    kept = [one for one in candidates if question_key(one.question) not in keys]
    if len(kept) < len(candidates):
        notes.append(_removed(len(candidates) - len(kept), which, "among the demonstrations"))
    return kept


def _removed(count: int, which: str, reason: str) -> str:
    return f"{count_of(count, f'{which} question')} removed: {'it is' if count == 1 else 'they are'} {reason}"


def _share(one: Candidate) -> float:
    return (question_hash(question_key(one.question)) >> 192) / 2**64


def _ordered(candidates: list[Candidate]) -> tuple[Problem, ...]:
    # Not the hash that made the split: of what it took, that would be no fair order.
    ordered = sorted(candidates, key=lambda one: question_hash(question_key(one.question), one.variant))
    return tuple(one.problem for one in ordered)


def _check_ids(candidates: list[Candidate]) -> None:
    seen: dict[str, str] = {}
    for one in candidates:
        if one.problem.id in seen:
            other = seen[one.problem.id]
            raise TaskError(
                f"columns.id: {one.problem.id!r} names two questions, {other[:60]!r} and "
                f"{one.question[:60]!r}; ids must differ across train and test (without columns.id they are "
                "made from the question)"
            )
        seen[one.problem.id] = one.question


class ProblemStream:
    """Shuffled passes over the problems. A batch never holds a problem twice: passes do not meet in one."""

    def __init__(self, problems: Sequence[Problem], batch_size: int, seed: int) -> None:
        if batch_size > len(problems):
            raise TaskError(
                f"rollout.prompts_per_step={batch_size}, but the task has only {len(problems)} training "
                "problems; lower it, or give more data"
            )
        self._problems = problems
        self._batch_size = batch_size
        self._seed = seed
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(derive_seed(self._seed, "problems", epoch)).shuffle(order)
        return order

    def batch(self, step: int) -> list[Problem]:
        """The problems of one step, counted from 0."""
        epoch, index = divmod(step, len(self._problems) // self._batch_size)
        start = index * self._batch_size
        return [self._problems[i] for i in self._order(epoch)[start : start + self._batch_size]]
