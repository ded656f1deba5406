"""Tell apart what a chat template writes itself and what comes from the contents of turns.

Control tokens that are spelled out in a content are text; those of the template are tokens. A template may
change a content: Gemma's removes spaces around it, Llama 3's writes a tool's result as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text. ``is_foreign``: control tokens in it are text, because an environment wrote it."""

    text: str
    is_foreign: bool = False


def joined(pieces: Sequence[Piece]) -> str:
    """Return the pieces' text."""
    return "".join(piece.text for piece in pieces)


def rendered_pieces(render: Callable[[Sequence[str]], str], contents: Sequence[str]) -> list[Piece]:
    """Return what ``render`` writes for the contents: the template's pieces, and between them the contents'.

    Marks are rendered in place of the contents, then each content in place of its mark. What stands where the
    mark stood is the content as the template writes it. Raise LookupError if the template leaves a content
    out, repeats it, or does not write contents in their order.
    """
    marks = [f"contentnumber{number}here" for number in range(len(contents))]
    shape = render(marks)
    own: list[str] = []
    rest = shape
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise LookupError("the chat template does not write every turn once, in order")
        own.append(before)
    own.append(rest)
    pieces = [Piece(own[0])]
    start = 0
    for number, content in enumerate(contents):
        start += len(own[number])
        before, after = shape[:start], shape[start + len(marks[number]) :]
        text = render([*marks[:number], content, *marks[number + 1 :]])
        is_between = (
            text.startswith(before) and text.endswith(after) and len(text) >= len(before) + len(after)
        )
        # A template that also changes its own text for this content is not followed in that.
        pieces.append(Piece(text[len(before) : len(text) - len(after)] if is_between else content, True))
        pieces.append(Piece(own[number + 1]))
        start += len(marks[number])
    return pieces
