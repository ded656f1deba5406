"""Small environments that random agents can play: guess a digit, by a tool or in plain text.

Recipes name them as ``FILE:CLASS`` (:func:`reference`), so that they run in processes of their own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def reference(name: str) -> str:
    """Return how a recipe names a class of this file."""
    return f"{Path(__file__).resolve()}:{name}"


def hint(guess: int, hidden: int) -> str:
    """Return what an environment says to a wrong guess."""
    return "+" if guess < hidden else "-"


class GuessByTool:
    """Guess a digit with a tool."""

    def __init__(self) -> None:
        self.done = False
        self._hidden, self._guesses = 0, 0

    def reset(self, hidden: int, **row: object) -> str:
        self._hidden = hidden
        return " Guess a digit."

    def guess(self, number: int) -> str:
        """Guess the digit.

        Args:
            number: The digit.
        """
        if number == 9:
            raise ValueError("nine is not allowed")
        self._guesses += 1
        self.done = number == self._hidden
        return "right" if self.done else hint(number, self._hidden)

    def get_reward(self) -> float:
        return 1.0 if self.done else 0.1 * min(self._guesses, 3)


class GuessInText:
    """Guess a digit: the first digit of the text counts. Every guess earns something, the right one most."""

    def __init__(self) -> None:
        self._hidden = 0

    def reset(self, hidden: int, **row: object) -> None:
        self._hidden = hidden

    def observe(self) -> str:
        return "#:"

    def step(self, text: str) -> tuple[str, float, bool]:
        digit = next((int(character) for character in text if character in "0123456789"), None)
        if digit is None:
            return "?", 0.0, False
        is_right = digit == self._hidden
        return ";" + hint(digit, self._hidden) + ":", 1.0 if is_right else 0.125, is_right


class Fragile(GuessInText):
    """Fails in the way that the row's column ``fault`` names."""

    def reset(self, hidden: int, fault: str = "", **row: object) -> None:
        super().reset(hidden)
        self._fault = fault
        if fault == "reset":
            raise RuntimeError("there is no such level")

    def step(self, text: str) -> tuple[str, float, bool]:
        if self._fault == "step":
            raise ZeroDivisionError("by zero")
        if self._fault == "hang":
            time.sleep(1000)
        if self._fault == "die":
            os._exit(3)
        return super().step(text)


class NeverDone(GuessInText):
    """Goes on for ever, and pays 1 for every turn."""

    def step(self, text: str) -> tuple[str, float, bool]:
        return ";:", 1.0, False


class Judged:
    """A tool without a reward of its own: reward functions judge the conversation."""

    def reset(self, hidden: int, **row: object) -> None:
        self._hidden = hidden

    def guess(self, number: int) -> str:
        """Guess the digit.

        Args:
            number: The digit.
        """
        return "right" if number == self._hidden else hint(number, self._hidden)
