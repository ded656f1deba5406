"""Answer formats: where a response states its answer, and how a demonstration shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hacrl.tasks.math.extraction import extract_answer


@dataclass(frozen=True)
class AnswerFormat:
    """A prompt that asks for the format, a response in it, and a function that extracts the answer."""

    prompt: str  # the default template
    response: str  # with {answer} in it
    extract: Callable[[str], str | None]

    def write(self, answer: str) -> str:
        """Return a response with this answer, as demonstrations show it."""
        return self.response.replace("{answer}", answer.strip())


def last_line(text: str) -> str | None:
    """Return the last line that is not blank."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def whole_text(text: str) -> str | None:
    """Return the whole response without surrounding white space; None if nothing is left."""
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
