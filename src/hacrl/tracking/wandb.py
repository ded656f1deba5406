"""Log to Weights & Biases. Its environment variables and settings apply, e.g. ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hacrl.errors import ConfigError
from hacrl.plain_text import printable
from hacrl.tracking.base import Backend, TrackedRun
from hacrl.tracking.samples import COLUMNS, RolloutRow
from hacrl.tracking.scalars import Scalars


class Wandb(Backend):
    """One new wandb run, independent of other runs of the process."""

    def __init__(self) -> None:
        self._wandb: Any = import_module("wandb")
        self._run: Any = None
        self._notes: list[list[int | str]] = []  # step and text
        if os.environ.get("WANDB_MODE", "online") in ("online", "shared"):
            self._log_in()

    def _log_in(self) -> None:
        """Ask for a key in a terminal; elsewhere raise ConfigError now if the key is missing."""
        try:
            self._wandb.login()
        except self._wandb.Error as error:
            raise ConfigError(
                f"trackers: wandb cannot log in: {error} (run: wandb login; or set WANDB_MODE=offline)"
            ) from error

    def start(self, run: TrackedRun) -> None:
        """Start a run with the config."""
        self._run = self._wandb.init(
            project=run.project, name=run.name, config=dict(run.config), reinit="create_new"
        )

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Log all numbers; slashes in names make a section per agent."""
        self._run.log(scalars, step=step)

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Log one table per step; wandb shows its cells as plain text."""
        table = self._wandb.Table(columns=COLUMNS, data=[row.values for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def log_note(self, step: int, note: str) -> None:
        """Log the table of all notes again: wandb shows the newest one."""
        self._notes.append([step, printable(note)])
        table = self._wandb.Table(columns=["step", "note"], data=list(self._notes))
        self._run.log({"notes": table}, step=step)

    def finish(self, succeeded: bool) -> None:
        """Wait until all data is sent, and mark the run as finished or failed."""
        self._run.finish(exit_code=0 if succeeded else 1)
