"""How a question is put: a template, a system prompt, worked demonstrations as real turns of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.errors import TaskError
from hacrl.types import Turn

SLOT = "{problem}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A question and a full answer to it, shown before the real question."""

    problem: str
    solution: str


@dataclass(frozen=True)
class PromptStyle:
    """Everything around a question."""

    template: str
    context: tuple[Turn, ...] = ()

    def render(self, question: str) -> str:
        """The template with the question in it; braces elsewhere, as in ``\\boxed{}``, stay."""
        return self.template.replace(SLOT, question)


def prompt_style(template: str, system: str | None, demonstrations: Iterable[Demonstration]) -> PromptStyle:
    """Check the template, and write system prompt and demonstrations as turns."""
    if not isinstance(template, str) or SLOT not in template:
        raise TaskError(f"prompt={template!r}: must be text that contains {SLOT}, where the question goes")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise TaskError(f"system={system!r}: must be text; leave it out for no system prompt")
    turns = [] if system is None else [Turn("system", system)]
    for shown in demonstrations:
        turns.append(Turn("user", template.replace(SLOT, shown.problem)))
        turns.append(Turn("assistant", shown.solution))
    return PromptStyle(template, tuple(turns))


def parse_demonstrations(given: Sequence[Any]) -> tuple[Demonstration, ...]:
    """A list of ``{problem: ..., solution: ...}``."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TaskError(f"demonstrations={given!r}: must be a list of {{problem: ..., solution: ...}}")
    parsed = []
    for number, entry in enumerate(given, start=1):
        if isinstance(entry, Demonstration):
            parsed.append(entry)
            continue
        fits = isinstance(entry, dict) and set(entry) == {"problem", "solution"}
        if not fits or not all(isinstance(text, str) and text.strip() for text in entry.values()):
            raise TaskError(
                f"demonstrations: entry {number} must be {{problem: TEXT, solution: TEXT}}, not {entry!r}"
            )
        parsed.append(Demonstration(entry["problem"], entry["solution"]))
    return tuple(parsed)
