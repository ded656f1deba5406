"""What a Python user hooks into a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hacrl.training.observer import Observer

if TYPE_CHECKING:
    from hacrl.api.trainer import HACRLTrainer


class Callback(Observer):
    """Watches a run: a subclass overrides what it cares about, e.g. ``on_step`` or ``on_evaluation``.

    The one thing it may change is how long the run goes on: ``self.trainer.stop()``.
    """

    trainer: HACRLTrainer
    """The trainer this callback was given to; set before anything is called."""
