"""How a problem becomes a prompt: a template, a system prompt, and demonstrations as turns of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.errors import TaskError
from hacrl.types import Turn

SLOT = "{problem}"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A problem with a full solution, shown before the real problem."""

    problem: str
    solution: str


@dataclass(frozen=True)
class PromptStyle:
    """The template of a prompt, and the turns that come before it."""

    template: str
    context: tuple[Turn, ...] = ()

    def render(self, question: str) -> str:
        """Return the template with the question filled in. Other braces, as in ``\\boxed{}``, stay."""
        return self.template.replace(SLOT, question)


def prompt_style(template: str, system: str | None, demonstrations: Iterable[Demonstration]) -> PromptStyle:
    """Check the options and return the style, with the system prompt and the demonstrations as turns."""
    if not isinstance(template, str) or SLOT not in template:
        raise TaskError(f"prompt={template!r}: must be text that contains {SLOT}, where the question goes")
    if system is not None and (not isinstance(system, str) or not system.strip()):
        raise TaskError(f"system={system!r}: must be text; leave it out for no system prompt")
    turns = [] if system is None else [Turn("system", system)]
    for demonstration in demonstrations:
        turns.append(Turn("user", template.replace(SLOT, demonstration.problem)))
        turns.append(Turn("assistant", demonstration.solution))
    return PromptStyle(template, tuple(turns))


def parse_demonstrations(given: Sequence[Any]) -> tuple[Demonstration, ...]:
    """Return the demonstrations of a list of ``{problem: ..., solution: ...}``."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TaskError(f"demonstrations={given!r}: must be a list of {{problem: ..., solution: ...}}")
    parsed = []
    for number, entry in enumerate(given, start=1):
        if isinstance(entry, Demonstration):
            parsed.append(entry)
            continue
        has_keys = isinstance(entry, dict) and set(entry) == {"problem", "solution"}
        if not has_keys or not all(isinstance(text, str) and text.strip() for text in entry.values()):
            raise TaskError(
                f"demonstrations: entry {number} must be {{problem: TEXT, solution: TEXT}}, not {entry!r}"
            )
        parsed.append(Demonstration(entry["problem"], entry["solution"]))
    return tuple(parsed)
