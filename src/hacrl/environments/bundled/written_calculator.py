"""A calculator that an agent calls in plain text, for models too small for a tool format.

The agent writes an operation in brackets as the end of a turn, ``[23+14]``, and the environment answers with
its value, ``37``, from which the agent goes on. The task is that of ``arithmetic``: after ``#`` comes the
answer, which ends the episode. An agent may also write the steps itself, ``23+14=37;``.
"""

from __future__ import annotations

import re
from typing import Any

_CALL = re.compile(r"\[([0-9]{1,9})([-+*])([0-9]{1,9})\]\Z")
_ANSWER = re.compile(r"#(0|-?[1-9][0-9]{0,18})\Z")
NOT_UNDERSTOOD = "?"


class WrittenCalculator:
    """The text form: ``[A+B]`` at the end of a turn is computed; ``#N`` ends the episode, right or wrong.

    A turn that ends with neither is answered with ``?`` and ends the episode.
    """

    def __init__(self) -> None:
        self._gold = ""

    def reset(self, answer: str = "", **row: Any) -> str:
        """Begin an episode; nothing is added to the prompt."""
        self._gold = str(answer)
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer one turn of the agent."""
        if answer := _ANSWER.search(text):
            return "", float(answer[1] == self._gold), True
        if call := _CALL.search(text):
            return _value(int(call[1]), call[2], int(call[3])), 0.0, False
        return NOT_UNDERSTOOD, 0.0, True


def _value(left: int, operator: str, right: int) -> str:
    if operator == "+":
        return str(left + right)
    return str(left - right if operator == "-" else left * right)
