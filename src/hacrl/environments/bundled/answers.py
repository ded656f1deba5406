"""Compare submitted answers with gold answers, and the part that environments with one answer share."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
LONGEST_ANSWER = 200  # characters; a longer text is wrong


def same_answer(given: str, gold: str) -> bool:
    """Return whether an answer equals the gold answer: as a number if both are, else as text.

    A currency sign, separators of thousands, white space around the answer, a full stop after it, and quotes
    around it do not count; nor does the case of text. ``1,200.50`` equals ``$1200.5``.
    """
    if len(given) > LONGEST_ANSWER:
        return False
    left, right = as_number(given), as_number(gold)
    if left is not None and right is not None:
        return left == right
    return _plain(given) == _plain(gold) != ""


def as_number(text: str) -> Fraction | None:
    """Return the number that a text consists of, or None."""
    cleaned = _THOUSANDS.sub("", _plain(text).strip("$€£% "))
    return Fraction(cleaned) if _NUMBER.fullmatch(cleaned) and cleaned.isascii() else None


def _plain(text: str) -> str:
    return " ".join(text.strip().rstrip(".").strip("'\"").casefold().split())


class OneAnswer:
    """An environment whose reward is 1 if the agent submits the right answer, else 0.

    A subclass adds tools. The first submission counts and ends the episode.
    """

    def __init__(self) -> None:
        self._gold = ""
        self._submitted: str | None = None

    def reset(self, answer: str = "", **row: Any) -> str | None:
        """Begin an episode with its gold answer."""
        self._gold = str(answer)
        self._submitted = None
        return None

    @property
    def done(self) -> bool:
        """Whether the agent has submitted an answer."""
        return self._submitted is not None

    def submit(self, answer: str) -> str:
        """Submit the final answer. Only the first submission counts.

        Args:
            answer: The answer alone, for example 42. Give no unit and no explanation.

        Returns:
            A confirmation.
        """
        if self._submitted is not None:
            return "An answer has been submitted already."
        self._submitted = str(answer)
        return "The answer has been submitted."

    def get_reward(self) -> float:
        """Return 1 if the submitted answer is right, else 0."""
        return float(self._submitted is not None and same_answer(self._submitted, self._gold))
