"""Show text of models, data sets and files without letting it do anything.

Terminals obey escape sequences; Markdown and HTML obey their markup; bidirectional or invisible characters
disguise one text as another. Everything that is printed or written for people to read goes through here.
"""

from __future__ import annotations

import json
import re
from typing import Any
from unicodedata import category

# Controls (C0, DEL, C1), formats (bidirectional, zero width, tags), surrogates, line separators.
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_MARKDOWN = re.compile(r"[\\`*&<>|\[\]]")


def printable(text: str, *, multiline: bool = False) -> str:
    r"""Return the text with every invisible character written as an escape, e.g. ``\x1b`` and ``\u202e``.

    With ``multiline``, newlines and tabs are kept; otherwise the result is always one line.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if multiline else ""
    return "".join(
        character if character in kept or _is_visible(character) else _escaped(character)
        for character in text
    )


def markdown_text(text: str) -> str:
    """Return one line for a Markdown document or table cell, with all Markdown and HTML markup disabled."""
    return _MARKDOWN.sub(lambda found: f"&#{ord(found[0])};", printable(text))


def plot_text(text: str) -> str:
    """Return one line for matplotlib, which would typeset text between dollar signs as a formula."""
    return printable(text).replace("$", r"\$")


def json_text(content: Any, indent: int | None = None) -> str:
    """Return JSON that is readable in any language and parses to the same content.

    Invisible characters are written as JSON escapes. So ``cat`` is safe, and every reader agrees on where a
    line of JSONL ends.
    """
    written = json.dumps(content, indent=indent, ensure_ascii=False)
    if written.isprintable():
        return written
    # Outside of strings the only invisible characters are newlines; inside, json has escaped ASCII controls.
    return "".join(
        character if character == "\n" or _is_visible(character) else json.dumps(character)[1:-1]
        for character in written
    )


def half_character(text: str) -> str | None:
    """Return the first lone surrogate of a text, which UTF-8 and tokenizers cannot hold; None without any."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return text[error.start]
    return None


def _is_visible(character: str) -> bool:
    """Return whether a reader sees the character; a space counts as visible."""
    return character.isprintable() or category(character) not in _INVISIBLE


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
