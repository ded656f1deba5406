"""Where an earlier process left a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hacrl.errors import CheckpointError
from hacrl.execution.results import RunResult
from hacrl.learning.trainer import Trainer


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint's content, and what is known of the run until then."""

    state: Mapping[str, Any] | None  # None: there is no checkpoint, the run begins again
    tensors: Mapping[str, Mapping[str, Any]]
    positions: Mapping[str, int]  # how much of each file belongs to what was done
    data: str | None  # fingerprint of the problems
    result: RunResult  # until then
    notes: tuple[str, ...] = ()

    @property
    def steps_done(self) -> int:
        """Whole steps."""
        return 0 if self.state is None else int(self.state["steps_done"])

    def check_data(self, fingerprint: str) -> None:
        """The problems must be those the run began with: others would be another run."""
        if self.data is not None and self.data != fingerprint:
            raise CheckpointError(
                "the task's problems are not those this run began with: the data set or the package that "
                "makes them has changed. Go on with the same data, or start a new run from the saved agents"
            )

    def restore(self, trainer: Trainer) -> None:
        """Put the trainer where it was."""
        if self.state is None:
            return
        try:
            trainer.load_state_dict(self.state, self.tensors)
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit this run: {error!r}; was it written by another recipe?"
            ) from error
