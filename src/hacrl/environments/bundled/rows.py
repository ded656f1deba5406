"""Rows of the bundled environments: generated questions, held apart by a hash of the question."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

from hacrl.errors import TaskError
from hacrl.seeding import derive_seed

Row = dict[str, Any]  # columns of a data set: prompt, answer, and what the environment's reset needs
TEST_SHARE = 0.1  # of all questions, whatever the seed
MAX_REPEATS = 2000  # draws without a new question after which a generator counts as exhausted


def draw_rows(
    name: str, draw: Callable[[random.Random], Row], *, size: int, test_size: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Return ``size`` training rows and ``test_size`` test rows; the questions of all rows differ.

    A hash of the prompt decides to which of the two a question belongs. So no seed and no size moves a
    question to the other side. Raise TaskError if the generator has too few questions.
    """
    for option, value, least in (("size", size, 1), ("test_size", test_size, 0), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise TaskError(f"{option}={value!r}: must be a whole number of at least {least}")
    rng = random.Random(derive_seed(seed, "environment rows", name))
    train: list[Row] = []
    test: list[Row] = []
    seen: set[str] = set()
    repeats = 0
    while len(train) < size or len(test) < test_size:
        row = draw(rng)
        prompt = row["prompt"]
        held_out = is_held_out(prompt)
        side, wanted = (test, test_size) if held_out else (train, size)
        is_new = prompt not in seen and len(side) < wanted
        repeats = 0 if is_new else repeats + 1
        if is_new:
            seen.add(prompt)
            side.append(row)
        elif repeats > MAX_REPEATS:
            raise TaskError(
                f"size: {name} has too few different questions: {len(train)} of {size} for training and "
                f"{len(test)} of {test_size} for test were found; lower them, or widen the other options"
            )
    return train, test


def is_held_out(prompt: str) -> bool:
    """Return whether a question belongs to the test rows."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < TEST_SHARE * 2**64
