"""Train and test splits that never share a question, each in a fixed shuffled order.

A question is identified by its text in Unicode NFC with white space collapsed; case counts. A hash of that
text decides the split and the order. Neither depends on row positions or random streams, so every process
and every machine gets the same splits.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hacrl.errors import TaskError
from hacrl.types import Problem

DEFAULT_TEST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem before splitting. ``variant`` separates rows with equal questions and different judging."""

    question: str
    problem: Problem
    variant: str = ""


@dataclass(frozen=True)
class Splits:
    """Disjoint problems, and notes that say what was removed."""

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    notes: tuple[str, ...]


def question_key(text: str) -> str:
    """Return the normalised text that identifies a question."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def question_hash(*parts: str) -> int:
    """Return a 256-bit hash. The key alone decides the split; key and variant decide the order."""
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).digest())


def question_id(text: str) -> str:
    """Return a short id; equal questions get equal ids."""
    return f"{question_hash(question_key(text)) >> 192:016x}"


def make_splits(
    train: Sequence[Candidate],
    test: Sequence[Candidate] | None,
    *,
    test_share: float = 0.0,
    shown: Iterable[str] = (),
    limit: int | None = None,
) -> Splits:
    """Remove repeated questions, questions ``shown`` in the prompt, and test questions found in train.

    Without a test set, hold out about ``test_share`` of the training questions. ``limit`` caps the number of
    training problems.
    """
    notes: list[str] = []
    kept = _without_repeats(train, "training", notes)
    if test is None:
        held_out = [candidate for candidate in kept if _split_position(candidate) < test_share]
        kept = [candidate for candidate in kept if _split_position(candidate) >= test_share]
    else:
        held_out = _without_repeats(test, "test", notes)
        test_keys = {question_key(candidate.question) for candidate in held_out}
        before = len(kept)
        kept = [candidate for candidate in kept if question_key(candidate.question) not in test_keys]
        if len(kept) < before:
            notes.append(_removal_note(before - len(kept), "training", "in the test set"))
    shown_keys = {question_key(text) for text in shown}
    kept = _without_shown(kept, shown_keys, "training", notes)
    held_out = _without_shown(held_out, shown_keys, "test", notes)
    if not kept:
        raise TaskError("train: no training question is left" + "".join(f"; {note}" for note in notes))
    if test is None and test_share and not held_out:
        raise TaskError(
            f"test_share={test_share}: no question of {len(kept)} is held out; give a larger share, a test "
            "set, or 0 for none"
        )
    _check_ids([*kept, *held_out])
    if limit is not None and limit < len(kept):
        notes.append(f"{limit} of {len(kept)} training questions are used (limit)")
    return Splits(_shuffled(kept)[:limit], _shuffled(held_out), tuple(notes))


def check_test_share(test_share: float | None, test: object | None, default: float) -> float:
    """Return the share to hold out; refuse one beside a test set."""
    if test_share is None:
        return 0.0 if test is not None else default
    if test is not None:
        raise TaskError(f"test_share={test_share}: there is a test set already; give only one of the two")
    if isinstance(test_share, bool) or not isinstance(test_share, int | float) or not 0 <= test_share < 1:
        raise TaskError(f"test_share={test_share!r}: must be at least 0 and less than 1")
    return float(test_share)


def check_count(name: str, value: int | None, least: int = 1) -> None:
    """Raise TaskError unless ``value`` is None (no limit) or a whole number of at least ``least``."""
    if value is not None and (type(value) is not int or value < least):
        raise TaskError(f"{name}={value!r}: must be a whole number of at least {least}")


def plural(count: int, noun: str) -> str:
    """Return ``1 question`` or ``2 questions``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _without_repeats(candidates: Sequence[Candidate], split: str, notes: list[str]) -> list[Candidate]:
    first: dict[tuple[str, str], Candidate] = {}
    conflicting = 0
    for candidate in candidates:
        kept = first.setdefault((question_key(candidate.question), candidate.variant), candidate)
        conflicting += kept.problem.answer != candidate.problem.answer
    repeated = len(candidates) - len(first)
    if repeated:
        but = f", {conflicting} of them with another answer than the one kept" if conflicting else ""
        notes.append(f"{plural(repeated, f'repeated {split} question')} left out{but}")
    return list(first.values())


def _without_shown(
    candidates: list[Candidate], shown_keys: set[str], split: str, notes: list[str]
) -> list[Candidate]:
    kept = [candidate for candidate in candidates if question_key(candidate.question) not in shown_keys]
    if len(kept) < len(candidates):
        notes.append(_removal_note(len(candidates) - len(kept), split, "among the demonstrations"))
    return kept


def _removal_note(count: int, split: str, reason: str) -> str:
    return f"{plural(count, f'{split} question')} removed: {'it is' if count == 1 else 'they are'} {reason}"


def _split_position(candidate: Candidate) -> float:
    """A number in [0, 1) that depends on the question alone; questions below ``test_share`` are held out."""
    return (question_hash(question_key(candidate.question)) >> 192) / 2**64


def _shuffled(candidates: list[Candidate]) -> tuple[Problem, ...]:
    # Not the hash of the key alone: that one selected the split, so its order would not be a shuffle.
    ordered = sorted(
        candidates,
        key=lambda candidate: question_hash(question_key(candidate.question), candidate.variant),
    )
    return tuple(candidate.problem for candidate in ordered)


def _check_ids(candidates: list[Candidate]) -> None:
    questions: dict[str, str] = {}
    for candidate in candidates:
        if candidate.problem.id in questions:
            raise TaskError(
                f"columns.id: {candidate.problem.id!r} names two questions, "
                f"{questions[candidate.problem.id][:60]!r} and {candidate.question[:60]!r}; ids must differ "
                "across train and test (without columns.id they are made from the question)"
            )
        questions[candidate.problem.id] = candidate.question
