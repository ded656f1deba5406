"""TensorBoard: event files in the run's folder; ``tensorboard --logdir RUN/tensorboard``."""

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
        """Event files go into the run's own folder, so that they are kept and overwritten with it."""
        self._writer = self._writer_class(str(run.folder / FOLDER))
        self._writer.add_text("config", preformatted(run.config_yaml), 0)
        self._writer.flush()

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """One tag per name."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run that is killed keeps what it has shown

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """One text per agent, under a tag of its own."""
        for agent in dict.fromkeys(row.agent for row in rows):
            text = "\n\n".join(_shown(row) for row in rows if row.agent == agent)
            self._writer.add_text(f"{agent}/rollouts", text, step)
        self._writer.flush()

    def finish(self, succeeded: bool) -> None:
        """Event files know no outcome."""
        self._writer.close()


def preformatted(text: str) -> str:
    """Text that TensorBoard shows as it is.

    It reads Markdown, and takes unknown tags out: ``#42`` would become a heading and ``<think>`` vanish.
    Inside ``<pre>`` only HTML and fences of code are still looked for, so these characters are spelled out.
    """
    escaped = html.escape(printable(text, multiline=True)).replace("`", "&#96;").replace("~", "&#126;")
    return f"<pre>{escaped}</pre>"


def _shown(row: RolloutRow) -> str:
    heading = f"**reward {row.reward:g}** ({row.verdict}, {row.tokens} tokens)"
    return "\n\n".join([heading, preformatted(row.prompt), preformatted(row.response), "---"])
