"""Train several LLMs together from Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hacrl.api.agents import agent_requests, make_loaded
from hacrl.api.callback import Callback
from hacrl.api.config import HACRLConfig
from hacrl.api.task import choose_task
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, TrainingError
from hacrl.models.agent import Agent
from hacrl.runs.results import RunResult
from hacrl.runs.resume import resume_point_of
from hacrl.runs.run import LocalRun
from hacrl.tracking.progress import RunProgress
from hacrl.training.metrics import Accuracy
from hacrl.training.observer import Observer


class HACRLTrainer:
    """Trains any number of agents on one task; every verified rollout teaches all of them.

    The constructor checks all settings, loads the models, and creates the run's folder, which is the same as
    that of the command line. Models that are given as objects are trained in place.
    """

    def __init__(
        self,
        agents: Sequence[Any] | Mapping[str, Any],
        *,
        args: HACRLConfig,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        task: Any = None,
        callbacks: Sequence[Observer] = (),
    ) -> None:
        """Give the agents, and either ``task`` or ``reward_funcs`` with ``train_dataset``.

        ``agents``: a list, or a dict by name, of model names or folders, :class:`hacrl.AgentSettings`,
        mappings of their keys, ``(model, tokenizer)`` pairs, or agents of an earlier trainer.
        ``reward_funcs``: one or several functions with TRL's signature, or references ``"module:name"``.
        ``train_dataset``, ``eval_dataset``: a ``datasets.Dataset``, rows, a file, or a hub data set; column
        ``prompt`` is text or a list of messages. ``task``: a name such as ``"gsm8k"``, its settings, or an
        object with the attributes of :class:`hacrl.tasks.base.Task`.
        """
        requests = agent_requests(agents)
        choice = choose_task(task, reward_funcs, train_dataset, eval_dataset, args)
        config = args.run_config([request.section for request in requests], choice.section, choice.held_out)
        loaded = make_loaded(requests, config.agents)
        point = resume_point_of(config) if args.resume else None
        first_step = 0 if point is None else point.steps_done
        self._progress = _progress(config, first_step) if args.progress else None
        observers = [*([self._progress] if self._progress else []), *_checked_callbacks(callbacks, self)]
        self._closed = False
        self._has_trained = False
        self._run = LocalRun(config, observers, args.overwrite, choice.task, loaded, point)

    @property
    def agents(self) -> dict[str, Agent]:
        """Name -> agent, with its ``model`` and ``tokenizer`` as they are now."""
        return self._run.trainer.executor.agents

    @property
    def config(self) -> RunConfig:
        """The resolved config, as in the run's ``config.yaml``."""
        return self._run.config

    @property
    def result(self) -> RunResult:
        """Accuracies, rewards and costs of the run so far."""
        return self._run.result

    def train(self) -> RunResult:
        """Evaluate, make all steps, evaluate again, and save the agents in the run's folder."""
        if self._has_trained:
            raise TrainingError(
                "this trainer has trained already; to train further, make a new HACRLTrainer with "
                "agents=trainer.agents and another output"
            )
        self._has_trained = True
        try:
            with _show_progress(self._progress):
                self._run.train()
                self._run.save()
        finally:
            self.close()
        return self._run.result

    def evaluate(self) -> dict[str, Accuracy]:
        """Evaluate every agent alone on the held-out problems, always with the same problems and seeds."""
        accuracies = self._run.evaluate()
        if not accuracies:
            raise ConfigError(
                "there are no held-out problems to evaluate on: give eval_dataset or eval_share, "
                "and evaluation.problems above 0"
            )
        return accuracies

    def save_model(self, folder: str | Path) -> dict[str, Path]:
        """Write every agent as a plain Hugging Face folder ``folder/NAME``; return name -> folder."""
        saved = {}
        for name, agent in self.agents.items():
            saved[name] = Path(folder) / name
            agent.save(saved[name])
        return saved

    def stop(self) -> None:
        """End training after the current step; the run is evaluated and saved as usual."""
        self._run.trainer.stop()

    def close(self) -> None:
        """End the run: close trackers and worker processes. ``train`` calls this itself."""
        if not self._closed:
            self._closed = True
            self._run.close()

    def __enter__(self) -> HACRLTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked_callbacks(callbacks: Sequence[Any], trainer: HACRLTrainer) -> Sequence[Observer]:
    for callback in callbacks:
        if not isinstance(callback, Observer):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise ConfigError(
                f"callbacks: {given} is not an instance of a hacrl.Callback subclass "
                "(callbacks of transformers and TRL do not fit)"
            )
        if isinstance(callback, Callback):
            callback.trainer = trainer
    return callbacks


def _progress(config: RunConfig, first_step: int) -> RunProgress:
    from rich.console import Console

    names = [agent.name for agent in config.agents]
    return RunProgress(config.method.title, names, config.steps, Console(), first_step=first_step)


@contextmanager
def _show_progress(progress: RunProgress | None) -> Iterator[None]:
    """Show progress on the terminal, with transformers' progress bars turned off."""
    from transformers.utils import logging

    with ExitStack() as stack:
        if progress is not None:
            if logging.is_progress_bar_enabled():
                logging.disable_progress_bar()
                stack.callback(logging.enable_progress_bar)
            stack.enter_context(progress)
        yield
