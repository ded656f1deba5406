"""Ctrl-C ends a command with a sentence, not with a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

EXIT_INTERRUPTED = 130


@contextmanager
def told_when_interrupted(message: str | Callable[[], str]) -> Iterator[None]:
    """Say what is left of the interrupted work."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"interrupted: {message if isinstance(message, str) else message()}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
