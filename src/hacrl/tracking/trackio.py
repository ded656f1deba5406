"""Log to Trackio, local by default: ``trackio show --project hacrl``. Its environment variables apply."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hacrl.plain_text import printable
from hacrl.tracking.base import Backend, TrackedRun
from hacrl.tracking.samples import COLUMNS, RolloutRow
from hacrl.tracking.scalars import Scalars


class Trackio(Backend):
    """One trackio run."""

    def __init__(self) -> None:
        self._trackio: Any = import_module("trackio")
        self._run: Any = None
        self._notes: list[list[int | str]] = []  # step and text

    def start(self, run: TrackedRun) -> None:
        """Start a run with the config, without a dashboard in notebooks (``embed``)."""
        self._run = self._trackio.init(
            project=run.project, name=run.name, config=dict(run.config), embed=False
        )

    def log_scalars(self, step: int, scalars: Scalars) -> None:
        """Log all numbers; slashes in names make a group per agent."""
        self._run.log(scalars, step=step)

    def log_rollouts(self, step: int, rows: Sequence[RolloutRow]) -> None:
        """Log one table per step."""
        table = self._trackio.Table(columns=COLUMNS, data=[row.values for row in rows])
        self._run.log({"rollouts": table}, step=step)

    def log_note(self, step: int, note: str) -> None:
        """Log the table of all notes again."""
        self._notes.append([step, printable(note)])
        table = self._trackio.Table(columns=["step", "note"], data=list(self._notes))
        self._run.log({"notes": table}, step=step)

    def finish(self, succeeded: bool) -> None:
        """Close the run. The module's finish, unlike the run's, is not repeated at exit."""
        self._trackio.finish()
