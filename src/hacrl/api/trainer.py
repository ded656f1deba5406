"""Train several LLMs together from Python."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hacrl.api.agents import agent_requests, make_loaded
from hacrl.api.callback import Callback
from hacrl.api.config import HACRLConfig, with_adapters
from hacrl.api.stop_signals import stop_on_first_signal
from hacrl.api.task import choose_task
from hacrl.api.transformers_callbacks import TransformersCallback, events
from hacrl.api.trl import check_args, check_resume_argument, missing_member, refuse_trainer_arguments
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, TrainingError
from hacrl.models.agent import Agent
from hacrl.runs.results import RunResult
from hacrl.runs.resume import resume_point_of
from hacrl.runs.run import LocalRun
from hacrl.tracking.library_bars import library_bars_off
from hacrl.tracking.progress import RunProgress
from hacrl.training.metrics import Accuracy
from hacrl.training.observer import Observer

if TYPE_CHECKING:
    from transformers import TrainerState


class HACRLTrainer:
    """Trains any number of agents on one task; every verified rollout teaches all of them.

    The constructor checks all settings, loads the models, and creates the run's folder, which is the same as
    that of the command line. Models that are given as objects are trained in place.
    """

    def __init__(
        self,
        agents: Sequence[Any] | Mapping[str, Any] = (),
        *,
        args: HACRLConfig | None = None,
        reward_funcs: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        environment_factory: Any = None,
        task: Any = None,
        callbacks: Sequence[Any] | None = None,
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Give the agents and a task: ``task``, or ``train_dataset`` with rewards, an environment, or both.

        ``agents``: a list, or a dict by name, of model names or folders, :class:`hacrl.AgentSettings`,
        mappings of their keys, ``(model, tokenizer)`` pairs, or agents of an earlier trainer.
        ``reward_funcs``: one or several functions with TRL's signature, or references ``"module:name"``.
        ``train_dataset``, ``eval_dataset``: a ``datasets.Dataset``, rows, a file, or a hub data set; column
        ``prompt`` is text or a list of messages. ``environment_factory``: a class as in TRL, whose public
        methods are tools, or a dict of them by the name in the column ``environment``. ``task``: a name such
        as ``"gsm8k"``, its settings, or an object with the attributes of :class:`hacrl.tasks.base.Task`.
        ``callbacks``: of hacrl or transformers. ``peft_config``: a ``LoraConfig`` for all agents. Other
        arguments of TRL are answered with hacrl's.
        """
        refuse_trainer_arguments(others, _ARGUMENTS)
        check_args(args, HACRLConfig)
        assert args is not None
        if peft_config is not None:
            args = with_adapters(args, peft_config)
        self._resumes = args.resume
        self._closed = False
        self._has_trained = False
        self._progress: RunProgress | None = None
        with nullcontext() if args.progress else library_bars_off():
            requests = agent_requests(agents)
            choice = choose_task(task, reward_funcs, train_dataset, eval_dataset, args, environment_factory)
            sections = [request.section for request in requests]
            config = args.run_config(sections, choice.section, choice.held_out)
            loaded = make_loaded(requests, config.agents)
            point = resume_point_of(config) if args.resume else None
            if not isinstance(callbacks, Sequence | None):
                raise ConfigError(f"callbacks: must be a list, not {type(callbacks).__name__}")
            observers = [self._observer_of(callback) for callback in callbacks or ()]
            if args.progress:
                self._progress = _progress(config, 0 if point is None else point.steps_done)
                observers.insert(0, self._progress)
            self._run = LocalRun(config, observers, args.overwrite, choice.task, loaded, point)
        events(observers, "on_init_end")

    @property
    def agents(self) -> dict[str, Agent]:
        """Name -> agent, with its ``model`` and ``tokenizer`` as they are now.

        None with ``executor: ray``, where agents live in other processes.
        """
        return self._run.trainer.executor.agents

    @property
    def config(self) -> RunConfig:
        """The resolved config, as in the run's ``config.yaml``."""
        return self._run.config

    @property
    def result(self) -> RunResult:
        """Accuracies, rewards and costs of the run so far."""
        return self._run.result

    @property
    def state(self) -> TrainerState:
        """The run's state as transformers' ``TrainerState``: ``global_step``, ``log_history``, ..."""
        return self._run.state.state

    def __getattr__(self, name: str) -> Any:
        raise missing_member(self, name)

    def add_callback(self, callback: Any) -> None:
        """Pass further events to a callback: an instance of hacrl's or transformers' class, or a class."""
        observer = self._observer_of(callback() if isinstance(callback, type) else callback)
        self._run.observer.add(observer)

    def remove_callback(self, callback: Any) -> None:
        """Pass no more events to a callback; it may be given as its class."""
        self.pop_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback and return it; None if there is no such callback."""
        for observer in self._run.observer:
            own = observer.callback if isinstance(observer, TransformersCallback) else observer
            if own is callback or (isinstance(callback, type) and type(own) is callback):
                self._run.observer.remove(observer)
                return own
        return None

    def note(self, note: str) -> None:
        """Tell the user a sentence: on the terminal, in ``notes.txt``, and to all callbacks."""
        self._run.note(note)

    def train(self, resume_from_checkpoint: bool | str | None = None) -> RunResult:
        """Evaluate, make all steps, evaluate again, and save the agents in the run's folder.

        ``resume_from_checkpoint`` is TRL's; ``HACRLConfig(resume=True)`` is what resumes a run.
        """
        check_resume_argument(resume_from_checkpoint, self._resumes, self.config.output)
        if self._has_trained:
            raise TrainingError(
                "this trainer has trained already; to train further, make a new HACRLTrainer with "
                "agents=trainer.agents and another output"
            )
        self._has_trained = True
        try:
            with self._run as run, library_bars_off(), self._progress or nullcontext():
                note = _print_note
                if self._progress is not None:
                    note = partial(self._progress.on_note, run.trainer.steps_done)
                with stop_on_first_signal(run.interrupt, note) as received:
                    events(list(run.observer), "on_train_begin")
                    run.train()
                    run.save()
                    events(list(run.observer), "on_save")
                    events(list(run.observer), "on_train_end")
        finally:
            self._closed = True
        received.deliver(_what_is_saved(run))
        return run.result

    def evaluate(self, eval_dataset: Any = None) -> dict[str, Accuracy]:
        """Evaluate every agent alone on the held-out problems, always with the same problems and seeds."""
        if eval_dataset is not None:
            raise ConfigError(
                "evaluate: held-out problems are given to HACRLTrainer(eval_dataset=...); "
                "`hacrl eval RUN --on FILE` evaluates on others"
            )
        with self._library_bars():
            accuracies = self._run.evaluate()
        if not accuracies:
            raise ConfigError(
                "there are no held-out problems to evaluate on: give eval_dataset or eval_share, "
                "and evaluation.problems above 0"
            )
        return accuracies

    def save_model(self, output_dir: str | Path | None = None) -> dict[str, Path]:
        """Write every trained agent as a Hugging Face folder ``output_dir/NAME``; return name -> folder.

        The default is ``agents`` in the run's folder, where ``train`` writes the agents, too.
        """
        folder = Path(self.config.output) / "agents" if output_dir is None else Path(output_dir)
        saved = {}
        with self._library_bars():
            for name in self._run.trainer.learners:
                saved[name] = folder / name
                try:
                    saved[name].mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ConfigError(f"save_model: cannot write to {folder}: {error.strerror}") from error
                self._run.trainer.save_agent(name, saved[name])
        return saved

    def stop(self) -> None:
        """End training after the current step; the run is evaluated and saved as usual."""
        self._run.trainer.stop()

    def close(self) -> None:
        """End the run: close trackers and worker processes. ``train`` calls this itself."""
        if not self._closed:
            self._closed = True
            self._run.close()

    def _observer_of(self, callback: Any) -> Observer:
        """Return the observer of a callback; refuse what is none."""
        from transformers import TrainerCallback

        if isinstance(callback, TrainerCallback):
            return TransformersCallback(callback, self)
        if not isinstance(callback, Observer):
            given = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            raise ConfigError(
                f"callbacks: {given} is not an instance of a hacrl.Callback subclass, nor of a "
                "transformers.TrainerCallback subclass"
            )
        if isinstance(callback, Callback):
            callback.trainer = self
        return callback

    def _library_bars(self) -> AbstractContextManager[None]:
        """Return a block in which libraries show their progress bars only if hacrl shows progress."""
        return library_bars_off() if self._progress is None else nullcontext()

    def __enter__(self) -> HACRLTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ARGUMENTS = [name for name in inspect.signature(HACRLTrainer).parameters if name != "others"]


def _progress(config: RunConfig, first_step: int) -> RunProgress:
    from rich.console import Console

    names = [agent.name for agent in config.agents]
    return RunProgress(
        config.method.title,
        names,
        config.steps,
        Console(),
        first_step=first_step,
        overlaps=config.asynchronous.is_on,
    )


def _what_is_saved(run: LocalRun) -> str:
    """Say what a signal has left of a run, and how the run continues."""
    if not run.is_interrupted:
        return f"the run is finished, and its agents are saved in {run.config.output}"
    return (
        f"stopped after {run.trainer.steps_done} steps; everything is saved in {run.config.output}. "
        "To continue: make the same trainer with HACRLConfig(resume=True, ...) and call train()"
    )


def _print_note(note: str) -> None:
    """Print what a user who has pressed Ctrl-C must know, also without progress on the terminal."""
    print(f"hacrl: {note}", file=sys.stderr, flush=True)
