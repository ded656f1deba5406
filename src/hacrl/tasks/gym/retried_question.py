"""The environment of ``gym_retries:NAME``. The processes of episodes share its import of reasoning-gym."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hacrl.json_values import from_tagged_json
from hacrl.plugins import optional_module
from hacrl.tasks.gym.formats import FORMATS
from hacrl.tasks.gym.scoring import is_correct

NOT_FOUND = "No answer was found."
WRONG = "That is not right."
with suppress(ImportError):  # imported with this module, so that the processes of episodes share it
    importlib.import_module("reasoning_gym")


class GymQuestion:
    """The text form: one question, answered until the answer is right or no attempt is left.

    The reward of a right answer is ``discount`` to the power of the wrong answers before it.
    """

    def __init__(
        self, kind: str, config: Mapping[str, Any], seed: int, answer: str, attempts: int, discount: float
    ) -> None:
        gym = optional_module("reasoning_gym", extra="gym", needed_for=f"task gym_retries:{kind}")
        self._dataset = gym.create_dataset(kind, size=1, seed=seed, **config)
        self._format = FORMATS[answer]
        self._attempts = attempts
        self._discount = discount
        self._entry: Any = None
        self._wrong = 0

    def reset(self, entry: Any, **row: Any) -> str:
        """Begin with the row's question, as reasoning-gym recorded it. Nothing is added to the prompt."""
        self._entry = from_tagged_json(entry)
        self._wrong = 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool]:
        """Judge one answer; say whether it is wrong and how many attempts are left."""
        answer = self._format.extract(text)
        if answer is not None and self._is_right(answer):
            return "", self._discount**self._wrong, True
        self._wrong += 1
        left = self._attempts - self._wrong
        if left == 0:
            return "", 0.0, True
        instruction = self._format.prompt.replace("{problem}", "").strip()
        attempts = "One attempt is" if left == 1 else f"{left} attempts are"
        said = NOT_FOUND if answer is None else WRONG
        return f"{said} {attempts} left. {instruction}", 0.0, False

    def _is_right(self, answer: str) -> bool:
        try:
            return is_correct(self._dataset, answer, self._entry)
        except MemoryError:
            raise  # the process's state is unreliable: the episode fails
        except Exception:  # unusual text makes some scorers raise, which must not spare a wrong answer
            return False
