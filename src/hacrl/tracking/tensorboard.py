"""Write TensorBoard event files; show them with ``tensorboard --logdir RUN/tensorboard``."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from hacrl.plain_text import printable
from hacrl.tracking.base import Backend, TrackedRun
from hacrl.tracking.samples import RolloutRow
from hacrl.tracking.scalars import Scalars

FOLDER = "tensorboard"


class TensorBoard(Backend):
    """Scalars, the config and a few rollouts as text."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Write the config as text. The event files are in the run's folder and are replaced with it."""
        self._writer = self._writer_class(str(run.folder / FOLDER))
        self._writer.add_text("config", preformatted(run.config_yaml), 0)
        self._writer.flush()

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Write one tag per name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run loses nothing

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Write one text per agent, each under its own tag."""
        for agent in dict.fromkeys(row.agent for row in rows):
            text = "\n\n".join(_shown(row) for row in rows if row.agent == agent)
            self._writer.add_text(f"{agent}/rollouts", text, step)
        self._writer.flush()

    def log_note(self, step: int, note: str) -> None:
        """Write one text per note, all under one tag."""
        self._writer.add_text("notes", preformatted(note), step)
        self._writer.flush()

    def finish(self, succeeded: bool) -> None:
        """Close the file; event files do not record success or failure."""
        self._writer.close()


def preformatted(text: str) -> str:
    """Return markup that TensorBoard shows as the plain text.

    TensorBoard renders Markdown and removes unknown tags: ``#42`` would become a heading and ``<think>``
    would vanish. Inside ``<pre>`` it still interprets HTML and code fences, so their characters are escaped.
    """
    escaped = html.escape(printable(text, multiline=True)).replace("`", "&#96;").replace("~", "&#126;")
    return f"<pre>{escaped}</pre>"


def _shown(row: RolloutRow) -> str:
    heading = f"**reward {row.reward:g}** ({row.verdict}, {row.tokens} tokens)"
    details = [preformatted(row.details)] if row.details else []
    return "\n\n".join([heading, preformatted(row.prompt), preformatted(row.response), *details, "---"])
