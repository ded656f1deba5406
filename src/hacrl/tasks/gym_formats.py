"""How a response carries its answer, and how a demonstration shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hacrl.tasks.answers import last_line
from hacrl.tasks.verification.boxes import extract_answer


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
