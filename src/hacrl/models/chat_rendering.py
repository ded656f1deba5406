"""Tell apart what a chat template writes itself and what comes from the contents of turns.

Control tokens that are spelled out in a content are text; those of the template are tokens. A template may
change a content: Gemma's removes spaces around it, Llama 3's writes a tool's result as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hacrl.errors import ModelError


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. ``is_foreign``: control tokens in it are text, because an environment wrote it."""

    text: str
    is_foreign: bool = False


def joined(pieces: Sequence[Piece]) -> str:
    """Return the pieces' text."""
    return "".join(piece.text for piece in pieces)


def template_parts(render: Callable[[Sequence[str]], str], contents: int) -> tuple[str, ...]:
    """Return what ``render`` writes around so many contents: before, between and behind them.

    Raise LookupError if the template leaves a content out, repeats it, or changes the order.
    """
    marks = _marks(contents)
    parts: list[str] = []
    rest = render(marks)
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise LookupError("it does not write every turn once, in order")
        parts.append(before)
    return (*parts, rest)


def rendered_pieces(
    render: Callable[[Sequence[str]], str], contents: Sequence[str], parts: Sequence[str]
) -> list[Piece]:
    """Return what ``render`` writes for the contents: the template's parts, and between them the contents.

    Each content is rendered among marks. What stands where its mark would stand is the content as the
    template writes it. ``parts``: of :func:`template_parts`.
    """
    marks = _marks(len(contents))
    pieces = [Piece(parts[0])]
    for number, content in enumerate(contents):
        before = "".join(map(str.__add__, parts, marks[:number])) + parts[number]
        after = "".join(map(str.__add__, parts[number + 1 :], [*marks[number + 1 :], ""]))
        try:
            text = render([*marks[:number], content, *marks[number + 1 :]])
        except ModelError:  # a template that dislikes a text of the environment; the text counts as it is
            text = ""
        is_between = (
            text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        )
        # A template that also changes its own text for this content is not followed in that.
        pieces.append(Piece(text[len(before) : len(text) - len(after)] if is_between else content, True))
        pieces.append(Piece(parts[number + 1]))
    return pieces


def _marks(contents: int) -> list[str]:
    return [f"contentnumber{number}here" for number in range(contents)]
