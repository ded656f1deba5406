"""Callbacks of the Python interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hacrl.training.observer import Observer

if TYPE_CHECKING:
    from hacrl.api.trainer import HACRLTrainer


class Callback(Observer):
    """Observes a run: a subclass overrides the methods it needs, e.g. ``on_step`` or ``on_evaluation``.

    A callback cannot change the run, except that ``self.trainer.stop()`` ends it after the current step.
    """

    trainer: HACRLTrainer
    """The trainer that was given this callback; set before any method is called."""
