"""Print text with rich exactly as it is: rich would treat ``[bold]`` and ``:smile:`` as markup."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hacrl.plain_text import printable


def unstyled(text: str, *, multiline: bool = False) -> Text:
    """Return a line or a table cell that shows the text without markup and without control characters."""
    return Text(printable(text, multiline=multiline))


def print_unstyled(console: Console, text: str) -> None:
    """Print text without markup. Lines are not wrapped, so that logs can be searched by line."""
    console.print(unstyled(text, multiline=True), soft_wrap=True)
