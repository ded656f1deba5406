"""Text that a model, a data set or a file wrote is data: shown as it is, it must not do anything.

A terminal obeys escape sequences, Markdown and HTML obey their own marks, and bidirectional or invisible
characters make a text look like another one. Whatever is printed or written to be read goes through here.
"""

from __future__ import annotations

import json
import re
from typing import Any
from unicodedata import category

# Controls (C0, DEL, C1), formats (bidirectional, zero width, tags), halves of characters, line separators.
_NOT_SHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_MARKDOWN = re.compile(r"[\\`*&<>|\[\]]")


def printable(text: str, *, multiline: bool = False) -> str:
    r"""The text with every character that is not to be seen spelled out, e.g. ``\x1b`` and ``\u202e``.

    With ``multiline``, newlines and tabs stay; otherwise nothing can start a line of its own.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if multiline else ""
    return "".join(one if one in kept or is_shown(one) else _spelled_out(one) for one in text)


def is_shown(character: str) -> bool:
    """Whether a character is one that a reader sees, a space included."""
    return character.isprintable() or category(character) not in _NOT_SHOWN


def markdown_text(text: str) -> str:
    """One line for a Markdown document or a cell of its table: no mark-up, no HTML, no column of its own."""
    return _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def plot_text(text: str) -> str:
    """One line for matplotlib, which would read what stands between dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def json_text(content: Any, indent: int | None = None) -> str:
    """JSON that people can read in any language and that reads back as it was.

    Characters that are not to be seen are written as JSON's own escapes, so that ``cat`` is safe, and so
    that a line of JSONL is a line to every reader.
    """
    written = json.dumps(content, indent=indent, ensure_ascii=False)
    if written.isprintable():
        return written
    # outside of strings there are only newlines, of an indent; inside, json has escaped its own already
    return "".join(one if one == "\n" or is_shown(one) else json.dumps(one)[1:-1] for one in written)


def _spelled_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
