"""A run in this process: all agents on one machine, on one or more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hacrl.config.checks import check_plugin_method
from hacrl.config.schema import RunConfig
from hacrl.engines.registry import check_engines, engine_notes
from hacrl.errors import CheckpointError
from hacrl.executors.registry import find_executor, make_executor
from hacrl.models.agent import Agent
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.checkpointer import Checkpointer, data_fingerprint
from hacrl.runs.folder import ROLLOUTS, RunFolder, check_output
from hacrl.runs.hub import probe_hub_if_needed
from hacrl.runs.preflight import check_agents, preflight
from hacrl.runs.results import RunResult
from hacrl.runs.resume import ResumePoint
from hacrl.runs.trainer_state import StateKeeper
from hacrl.runs.watchdog import STALL_MINUTES, Watchdog
from hacrl.tasks.base import CheckedTask, ReadsTrainerState, Task
from hacrl.tasks.registry import make_task
from hacrl.tasks.stream import ProblemStream
from hacrl.tracking.registry import make_trackers
from hacrl.training.asynchronous.trainer import AsynchronousTrainer
from hacrl.training.metrics import Accuracy
from hacrl.training.observer import Observer, Observers
from hacrl.training.recovery import Recovery
from hacrl.training.reporter import Reporter, TrainingInterrupted
from hacrl.training.trainer import Trainer


@dataclass(frozen=True)
class KnownStart:
    """The agents' accuracies before training, which another run has measured in the same way."""

    accuracies: Mapping[str, Accuracy]
    measured_by: Path  # folder of that run


def run_locally(
    config: RunConfig,
    observers: Sequence[Observer] = (),
    overwrite: bool = False,
    task: Task | None = None,
    agents: Mapping[str, Agent] | None = None,
    resumed: ResumePoint | None = None,
    start: KnownStart | None = None,
) -> RunResult:
    """Train, write the run's folder, save the agents."""
    with LocalRun(config, observers, overwrite, task, agents, resumed, start) as run:
        run.train()
        run.save()
        return run.result


class LocalRun:
    """One open run. Everything is checked first; nothing is written before all models have loaded.

    ``task`` and ``agents`` (by name) replace what the config would make: the Python API passes objects.
    ``resumed`` is the point from which the run continues in its folder. ``start`` spares the evaluation
    before the first step.
    """

    def __init__(
        self,
        config: RunConfig,
        observers: Sequence[Observer] = (),
        overwrite: bool = False,
        task: Task | None = None,
        agents: Mapping[str, Agent] | None = None,
        resumed: ResumePoint | None = None,
        start: KnownStart | None = None,
    ) -> None:
        self.config = config = with_threads(config)
        self.is_interrupted = False
        self._is_closed = self._is_built = False
        self._folder = RunFolder(config)
        self._log = RolloutLog(self._folder.path / ROLLOUTS)
        self._checkpoints = Checkpointer(self._folder, config.checkpoint, self.note)
        self.result = RunResult(self._folder.path) if resumed is None else resumed.result
        check_plugin_method(config)
        check_agents(config, agents or ())
        check_engines(config)
        find_executor(config.executor)
        if resumed is None:
            check_output(config, overwrite)
        trackers = make_trackers(config, self._folder.path)
        overlaps = config.asynchronous.is_on
        watchdog = Watchdog(STALL_MINUTES, self._folder.path, self.note, overlaps=overlaps)
        self.state = StateKeeper(config.steps, 0 if resumed is None else resumed.steps_done)
        own = [self._folder, self._checkpoints, self.result, self.state, watchdog]
        self.observer = Observers([*own, *trackers, *observers])
        with probe_hub_if_needed(config, agents or (), has_task=task is not None):
            self._task = make_task(config.task) if task is None else task
            if isinstance(self._task, ReadsTrainerState):
                self._task.trainer_state = self.state.state
            try:
                checked = replace(preflight(config, self._task, agents), is_object=task is not None)
                self._checkpoints.data = data_fingerprint(checked.train, checked.test)
                if resumed is not None:
                    resumed.check_data(self._checkpoints.data)
                self.trainer = build_trainer(config, checked, self.observer, agents, self._log)
                self._is_built = True
                if self.trainer.executor.replaces_lost:
                    self.trainer.recovery = Recovery(
                        config, self.trainer.stream, self._log, self._checkpoints.newest_of
                    )
                self._open_folder(overwrite, resumed)
                self._report_start((*checked.notes, *checked.warnings) if resumed is None else resumed.notes)
                self._take_start(start)
            except BaseException as error:
                self._close_after(error)
                raise
        self.trainer.after_step = self._after_step

    def _report_start(self, notes: Sequence[str]) -> None:
        """Send the notes on what was checked and placed to the observers; trackers start with the first."""
        executor = self.trainer.executor
        for note in (*notes, *engine_notes(self.config, executor.devices), *executor.notes):
            self.note(note)
        self.trainer.report_restored_rollouts()

    def _take_start(self, start: KnownStart | None) -> None:
        if start is not None:
            self.trainer.start_accuracies = start.accuracies
            self.note(
                f"the accuracies before training are those of {start.measured_by}: the same agents, problems "
                "and random draws"
            )

    def _open_folder(self, overwrite: bool, resumed: ResumePoint | None) -> None:
        if resumed is None:
            self._folder.create(overwrite)
        else:
            resumed.restore(self.trainer)
            self._folder.reopen(resumed.positions)
        self._folder.write_status("running", self.trainer.steps_done)

    def __enter__(self) -> LocalRun:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        """Write down why the run failed, and close it."""
        if self._folder.is_open:
            with suppress(OSError, CheckpointError):  # a full disk or a deleted folder may be why it failed
                self._folder.write_status(
                    "failed", self.trainer.steps_done, f"{type(error).__name__}: {error}"
                )
        self.close()

    def train(self) -> None:
        """Make all steps of the config, with its evaluations, or stop early after :meth:`interrupt`."""
        try:
            self.trainer.train(self.config.steps)
        except TrainingInterrupted:
            self.is_interrupted = True

    @property
    def checkpoint_stalls(self) -> list[float]:
        """Seconds that training waited for each checkpoint."""
        return list(self._checkpoints.wait_seconds)

    def interrupt(self) -> None:
        """Stop after the phase under way; :meth:`save` then writes the state that a resumed run needs."""
        self.trainer.interrupt()

    def evaluate(self) -> dict[str, Accuracy]:
        """Evaluate every agent alone with its present weights. A closed run can be evaluated, too."""
        try:
            return self.trainer.evaluate(self.trainer.steps_done)
        finally:
            if self._is_closed:
                self.trainer.executor.release()
                self._task.close()

    def save(self) -> dict[str, Path]:
        """Write every agent as a plain Hugging Face folder; return name -> folder.

        Of an interrupted run, write the whole state instead.
        """
        self._folder.check_present()
        if self.is_interrupted:
            self._checkpoints.save(self.trainer, wait=True)
            self._folder.write_status("stopped", self.trainer.steps_done)
            return {}
        if self.config.checkpoint.every:
            self._checkpoints.save(self.trainer, wait=True)  # so that more steps can follow
        saved = {}
        for name in self.trainer.learners:
            self.observer.on_phase(self.trainer.steps_done, "save", name)
            saved[name] = self._folder.save_agent(name, self.trainer.save_agent)
        self._folder.write_status("finished", self.trainer.steps_done)
        self._prune_rollouts(is_finished=True)
        return saved

    def close(self) -> None:
        """End engines and the task's workers, finish checkpoints and trackers, and unlock the folder.

        If one of these fails, the others are done nevertheless.
        """
        self._is_closed = True
        with ExitStack() as stack:  # calls the last callback first
            stack.callback(self._folder.unlock)
            stack.callback(self._checkpoints.close)
            stack.callback(self.observer.on_end)
            stack.callback(self._task.close)
            if self._is_built:
                stack.callback(self.trainer.executor.release)

    def _after_step(self) -> None:
        self._checkpoints.after_step(self.trainer)
        self._prune_rollouts()
        self._folder.write_status("running", self.trainer.steps_done)

    def _prune_rollouts(self, is_finished: bool = False) -> None:
        """Delete rollouts that the recipe does not keep, unless a resumed run would still need them."""
        needed_from = None
        if self.config.checkpoint.every and not is_finished:
            needed_from = max((which.steps for which in self._checkpoints.store.ids()), default=0)
            needed_from = max(0, needed_from - self.config.asynchronous.max_staleness)  # late rollouts
        self._log.prune(self.config.keep_rollouts, self.trainer.steps_done, needed_from)

    def note(self, note: str) -> None:
        """Tell all observers a sentence that the user should read."""
        self.observer.on_note(self.trainer.steps_done, note)


def with_threads(config: RunConfig) -> RunConfig:
    """Return the config with the number of CPU threads, which decides how sums are rounded."""
    return config if config.threads else replace(config, threads=torch.get_num_threads())


def build_trainer(
    config: RunConfig,
    checked: CheckedTask | None = None,
    observer: Observer | None = None,
    loaded: Mapping[str, Agent] | None = None,
    log: RolloutLog | None = None,
) -> Trainer:
    """Place the agents' workers and return a trainer over them; checks what was not checked before."""
    checked = checked or preflight(config, make_task(config.task), loaded)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    make = AsynchronousTrainer if config.asynchronous.is_on else Trainer
    return make(
        config,
        make_executor(config, checked, loaded or {}),
        ProblemStream(checked.train, config.rollout.prompts_per_step, config.seed),
        checked.test,
        log,
        Reporter(observer),
    )
