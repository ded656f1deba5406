"""The state of a run as transformers' ``TrainerState``, which reward functions and callbacks of TRL read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hacrl.tracking.scalars import evaluation_scalars, step_scalars
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer

if TYPE_CHECKING:
    from transformers import TrainerState


class StateKeeper(Observer):
    """Keeps ``state`` up to date: finished steps, and all numbers of this process's steps.

    ``log_history`` has one entry per step and one per evaluation, with the names that trackers get.
    """

    def __init__(self, max_steps: int, steps_done: int = 0) -> None:
        from transformers import TrainerState

        self.state: TrainerState = TrainerState(
            global_step=steps_done, max_steps=max_steps, logging_steps=1, log_history=[]
        )

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Add the step's numbers."""
        self.state.global_step = report.step
        self.state.log_history.append({"step": report.step, **step_scalars(report, seconds)})

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Add the accuracies."""
        self.state.log_history.append({"step": step, **evaluation_scalars(accuracies)})
