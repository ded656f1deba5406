"""Callbacks of transformers and TRL (``TrainerCallback``) in a run of hacrl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hacrl.config.trl_names import config_answer
from hacrl.training.metrics import Accuracy, StepReport
from hacrl.training.observer import Observer, Phase

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from hacrl.api.trainer import HACRLTrainer

_UNUSED = ("should_save", "should_evaluate", "should_epoch_stop")  # requests that hacrl does not follow


class TransformersCallback(Observer):
    """Passes a run's events to a ``TrainerCallback``.

    It gets ``on_init_end``, ``on_train_begin``, ``on_step_begin``, ``on_step_end``, ``on_log``,
    ``on_evaluate``, ``on_save`` (of the trained agents) and ``on_train_end``, each with ``args``, ``state``,
    ``control``, and the keyword ``agents``; ``model`` and ``processing_class`` too if there is one agent.
    """

    def __init__(self, callback: TrainerCallback, trainer: HACRLTrainer) -> None:
        from transformers import TrainerControl

        self.callback = callback
        self._trainer = trainer
        self._control = TrainerControl()
        self._began = -1  # the last step that has begun
        self._noted: set[str] = set()

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Begin a step with its first phase."""
        if phase in ("sync", "rollout", "learn") and step > self._began:
            self._began = step
            self.event("on_step_begin")

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """End a step, and pass all its numbers on."""
        self.event("on_step_end")
        self.event("on_log", logs=dict(self._trainer.state.log_history[-1]))

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Pass the accuracies on."""
        self.event("on_evaluate", metrics=dict(self._trainer.state.log_history[-1]))

    def event(self, name: str, **details: Any) -> None:
        """Call one of the callback's methods, and follow a request to stop."""
        trainer = self._trainer
        agents = list(trainer.agents.values())
        if len(agents) == 1:
            details |= {"model": agents[0].model, "processing_class": agents[0].tokenizer}
        method = getattr(self.callback, name)
        method(_Args(trainer), trainer.state, self._control, agents=trainer.agents, **details)
        if self._control.should_training_stop:
            trainer.stop()
        for request in _UNUSED:
            if getattr(self._control, request) and request not in self._noted:
                self._noted.add(request)
                trainer.note(
                    f"callback {type(self.callback).__name__} asks for {request}, which has no effect here: "
                    "checkpoint.every and evaluation.every say how often a run saves and evaluates"
                )
            setattr(self._control, request, False)


class _Args(SimpleNamespace):
    """The part of ``TrainingArguments`` that callbacks read; other names are answered with hacrl's."""

    def __init__(self, trainer: HACRLTrainer) -> None:
        config = trainer.config
        super().__init__(
            output_dir=config.output,
            run_name=trainer.result.folder.name,
            max_steps=config.steps,
            logging_steps=1,
            learning_rate=config.learning.lr,
            seed=config.seed,
            report_to=list(config.trackers),
            process_index=0,
            world_size=1,
        )

    def __getattr__(self, name: str) -> Any:
        answer = config_answer(name)
        message = f"args has no {name!r}"
        raise AttributeError(f"{message}: {answer}" if answer else message)


def events(observers: Sequence[Observer], name: str) -> None:
    """Call one method of all TrainerCallbacks among the observers."""
    for observer in observers:
        if isinstance(observer, TransformersCallback):
            observer.event(name)
