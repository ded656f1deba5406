"""Run the runs of a study that are not finished, several at a time, each in a process of its own.

The runs of one seed begin from the same agents and are evaluated on the same problems with the same random
draws, whatever the variant. So the accuracy before training is measured once for each seed: the first run of
a seed measures it, and the others wait for it and take it over, to the last digit.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Literal

from hacrl.config.load import build_config, config_to_yaml, read_recipe
from hacrl.config.schema import (
    FEW_TOKENS,
    AgentSettings,
    CheckpointSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
)
from hacrl.errors import ConfigError
from hacrl.files import UnreadableFileError, check_inside
from hacrl.runs.checkpoint import CheckpointStore
from hacrl.runs.checkpointer import CHECKPOINTS
from hacrl.runs.results import RunResult, read_finished, read_start
from hacrl.runs.resume import changes, changes_rounding_only, resume_point_of
from hacrl.runs.run import KnownStart
from hacrl.studies.benchmarks import StudyBenchmarks, agents_before
from hacrl.studies.capacity import Capacity, FixedCapacity
from hacrl.studies.compare import PlannedRun
from hacrl.studies.study import RunKey

PARENT_CHECK_SECONDS = 1.0  # interval at which a worker checks that its parent lives
POLL_SECONDS = 1.0  # between looks at whether another run may start

State = Literal["new", "finished", "continues", "repeats"]


@dataclass(frozen=True)
class Progress:
    """How far a run of the study is."""

    state: State
    step: int = 0  # of the newest checkpoint, for a run that continues

    def describe(self) -> str:
        """Return what happens with the run, for the user."""
        if self.state == "continues":
            return f"continues after step {self.step}"
        if self.state == "repeats":
            return "starts again: it was interrupted and has no checkpoint (checkpoint.every)"
        return "is finished" if self.state == "finished" else "starts"


@dataclass(frozen=True)
class _Job:
    """What a process is to do: train, or continue, or neither, and then evaluate."""

    config: RunConfig
    progress: Progress
    start: KnownStart | None
    benchmarks: StudyBenchmarks | None
    before: bool  # evaluate the agents as they began, too


class StudyObserver:
    """Receives a study's events and does nothing. Subclasses override the events they use."""

    def on_done(self, run: PlannedRun, result: RunResult) -> None:
        """Handle a run that is done, or was done already."""

    def on_note(self, note: str) -> None:
        """Handle a sentence that the user should read."""


def run_study(
    runs: Sequence[PlannedRun],
    capacity: Capacity | None = None,
    observer: StudyObserver | None = None,
    overwrite: bool = False,
    benchmarks: StudyBenchmarks | None = None,
    make_pool: Callable[[int], Executor] | None = None,
) -> dict[RunKey, RunResult]:
    """Make the runs that are not finished, evaluate all on the benchmarks, and return all results.

    ``make_pool`` takes the number of runs; by default each run has a process.
    """
    capacity, watch = capacity or FixedCapacity(1), observer or StudyObserver()
    for run in runs:
        check_inside(run.folder, run.folder.parent.parent)  # the study's folder of FOLDER/VARIANT/seed-N
    progress = {run.key: progress_of(run, overwrite) for run in runs}  # check all runs first
    results: dict[RunKey, RunResult] = {}

    def keep(run: PlannedRun) -> None:
        results[run.key] = _result(run)
        watch.on_done(run, results[run.key])

    for run in runs:
        found = progress[run.key]
        if found.state in ("continues", "repeats"):
            watch.on_note(f"{run.variant}, seed {run.seed}, {found.describe()}")
        if found.state == "finished":
            _result(run)  # raises if the files are incomplete, before other runs take days
            if benchmarks is None:
                keep(run)
    _Execution(runs, progress, capacity, watch, keep, benchmarks).run(make_pool or _processes)
    return {run.key: results[run.key] for run in runs}


class _Execution:
    """A study under way."""

    def __init__(
        self,
        runs: Sequence[PlannedRun],
        progress: Mapping[RunKey, Progress],
        capacity: Capacity,
        watch: StudyObserver,
        keep: Callable[[PlannedRun], None],
        benchmarks: StudyBenchmarks | None,
    ) -> None:
        self._waiting = [
            run for run in runs if progress[run.key].state != "finished" or benchmarks is not None
        ]
        self._progress, self._capacity, self._watch = progress, capacity, watch
        self._keep, self._benchmarks = keep, benchmarks
        self._running: dict[Future[None], PlannedRun] = {}
        self._starts: dict[str, KnownStart] = {}
        firsts: dict[str, RunKey] = {}
        for run in runs:
            firsts.setdefault(agents_before(run.config), run.key)
            if progress[run.key].state == "finished":
                self._look_for_start(run)
        self._evaluate_before = set(firsts.values())
        self._is_alone = isinstance(capacity, FixedCapacity) and capacity.runs == 1
        self._limit = self._warmed = 0

    def run(self, make_pool: Callable[[int], Executor]) -> None:
        """Start runs while there is room, until all have ended; a failed run ends the study."""
        pool = make_pool(max(1, len(self._waiting)))
        try:
            while self._waiting or self._running:
                self._start_runs(pool)
                done, _ = wait(self._running, POLL_SECONDS, FIRST_COMPLETED)
                for future in done:
                    run = self._running.pop(future)
                    future.result()
                    self._look_for_start(run)
                    self._keep(run)
        except BaseException:  # a failed run or Ctrl-C ends the study: start no further run
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()

    def _start_runs(self, pool: Executor) -> None:
        limit = self._capacity.limit([run.folder for run in self._running.values()])
        if self._limit and limit > self._limit:
            self._watch.on_note(self._capacity.describe())
        self._limit = max(limit, self._limit)
        while self._waiting and len(self._running) < limit and (run := self._next()) is not None:
            self._waiting.remove(run)
            config = run.config if self._is_alone else _with_fixed_micro_batches(run.config)
            job = _Job(
                config,
                self._progress[run.key],
                self._starts.get(start_key(run.config)),
                self._benchmarks,
                run.key in self._evaluate_before,
            )
            self._running[pool.submit(_run, job)] = run
        # Runs that wait for another one's evaluation find a process that has imported everything.
        for _ in range(self._warmed, min(limit - len(self._running), len(self._waiting))):
            pool.submit(_warm_up)
            self._warmed += 1

    def _next(self) -> PlannedRun | None:
        """Return the first run that need not wait for another one's evaluation before training."""
        for run in self._running.values():
            self._look_for_start(run)
        measuring = {start_key(run.config) for run in self._running.values()} - self._starts.keys()
        for run in self._waiting:
            if self._progress[run.key].state == "finished" or start_key(run.config) not in measuring:
                return run
        return None

    def _look_for_start(self, run: PlannedRun) -> None:
        """Take over what a run has measured before training, once it has."""
        key = start_key(run.config)
        if key in self._starts or run.config.asynchronous.is_on or _changed_settings(run):
            return
        accuracies = read_start(run.folder)
        if accuracies.keys() == {agent.name for agent in run.config.agents}:
            self._starts[key] = KnownStart(accuracies, run.folder)


def start_key(config: RunConfig) -> str:
    """Return a text that is equal for runs whose evaluation before training is the same.

    What only learning, training rollouts and the run's folder depend on is left out. Asynchronous runs
    evaluate beside other work; they measure their own.
    """
    if config.asynchronous.is_on:
        return config.output
    rollout = replace(
        config.rollout,
        prompts_per_step=RolloutSettings.prompts_per_step,
        rollouts_per_prompt=RolloutSettings.rollouts_per_prompt,
        resample=RolloutSettings.resample,
        temperature=RolloutSettings.temperature,
        top_k=RolloutSettings.top_k,
        top_p=RolloutSettings.top_p,
    )
    agents = tuple(
        replace(agent, lr=AgentSettings.lr, rollouts_per_prompt=AgentSettings.rollouts_per_prompt)
        for agent in config.agents
    )
    return config_to_yaml(
        replace(
            config,
            agents=agents,
            rollout=rollout,
            method=HacpoSettings(),
            learning=replace(LearningSettings(), compile=config.learning.compile),
            evaluation=replace(config.evaluation, every=0),
            checkpoint=CheckpointSettings(),
            steps=1,
            output="-",
            trackers=(),
            logged_rollouts=0,
            keep_rollouts="none",
        )
    )


def progress_of(run: PlannedRun, overwrite: bool = False) -> Progress:
    """Return how far a run is; raise ConfigError if its folder holds a run with other settings."""
    if not os.path.lexists(run.folder / "config.yaml"):
        return Progress("new")
    if changed := _changed_settings(run):
        if overwrite:
            return Progress("new")
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({', '.join(changed)}); use another "
            "--output, or --overwrite to replace such runs"
        )
    # saving the agents is a run's last action
    if all((run.folder / "agents" / agent.name / "config.json").is_file() for agent in run.config.agents):
        return Progress("finished")
    steps = max((which.steps for which in CheckpointStore(run.folder / CHECKPOINTS).ids()), default=None)
    return Progress("repeats") if steps is None else Progress("continues", steps)


def _changed_settings(run: PlannedRun) -> list[str]:
    """Return the settings in which the folder's run differs, except those that affect rounding only."""
    path = run.folder / "config.yaml"
    try:
        existing = build_config(read_recipe(path, run.folder), str(path))
    except ConfigError as error:
        return [str(error)]
    return [key for key in changes(existing, run.config) if not changes_rounding_only(key)]


def _with_fixed_micro_batches(config: RunConfig) -> RunConfig:
    """Set the micro-batch size: automatic sizing assumes that a run has the device to itself."""
    tokens = config.learning.micro_batch_tokens or FEW_TOKENS
    return replace(config, learning=replace(config.learning, micro_batch_tokens=tokens))


def _result(run: PlannedRun) -> RunResult:
    """Return the result of a finished run; raise ConfigError if its files are incomplete."""
    try:
        return read_finished(run.folder, run.config.steps, [agent.name for agent in run.config.agents])
    except UnreadableFileError as error:
        raise ConfigError(f"{error}; delete {run.folder} to repeat this run") from error


def _processes(most: int) -> Executor:
    """Return a pool that starts a process when all others are busy, and keeps it for further runs."""
    return ProcessPoolExecutor(
        most, mp_context=get_context("spawn"), initializer=_exit_with_parent, initargs=(os.getpid(),)
    )


def _exit_with_parent(parent: int) -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="hacrl-parent", daemon=True).start()


def _warm_up() -> None:
    """Import in this process what a run needs; with a study's modules, torch is imported already."""
    import transformers  # noqa: F401


def _run(job: _Job) -> None:
    """Do the job in this process; the next run in it finds the device's memory free."""
    from hacrl.evaluation.run import free_memory
    from hacrl.runs.run import run_locally
    from hacrl.tracking.library_bars import library_bars_off

    with library_bars_off():
        if job.progress.state == "continues":
            run_locally(job.config, resumed=resume_point_of(job.config), start=job.start)
        elif job.progress.state != "finished":
            run_locally(job.config, overwrite=True, start=job.start)
        free_memory()
        if job.benchmarks is not None:
            job.benchmarks.evaluate(job.config, job.before)
            free_memory()
