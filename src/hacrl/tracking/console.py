"""Plain text for rich, which would take ``[bold]`` and ``:smile:`` in it for its own."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hacrl.plain_text import printable


def literal(text: str, *, multiline: bool = False) -> Text:
    """A cell or a line that shows the text as it is."""
    return Text(printable(text, multiline=multiline))


def say(console: Console, text: str) -> None:
    """Print a text as it is, without breaking its lines anew: a log is searched by line."""
    console.print(literal(text, multiline=True), soft_wrap=True)
