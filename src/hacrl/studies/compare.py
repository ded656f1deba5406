"""Run a study: one recipe under several variants and seeds, each run in a process of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from hacrl.config.checks import check_plugin_method
from hacrl.config.load import build_config, config_to_yaml, read_recipe
from hacrl.config.schema import FEW_TOKENS, HacpoSettings, LearningSettings, RunConfig
from hacrl.errors import ConfigError
from hacrl.files import UnreadableFileError, check_inside
from hacrl.runs.preflight import preflight
from hacrl.runs.results import RunResult, read_finished
from hacrl.runs.resume import changes, changes_rounding_only
from hacrl.studies.variants import Recipe, variant_recipe
from hacrl.tasks.registry import make_task

# Defaults of a study's runs, which the recipe may override. A study restarts an interrupted run from the
# beginning, so checkpoints would only fill the disk.
STUDY_DEFAULTS: Recipe = {
    "threads": 1,
    "logged_rollouts": 0,
    "keep_rollouts": "none",
    "checkpoint": {"every": 0},
}


PARENT_CHECK_SECONDS = 1.0  # interval at which a worker checks that its parent lives


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    variant: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run's folder, which may not exist yet."""
        return Path(self.config.output)


def plan_runs(recipe: Recipe, variants: Sequence[str], seeds: int, output: Path) -> list[PlannedRun]:
    """Return all runs of a study, with checked configs. Runs with equal seeds see the same problems.

    Seeds count up from the recipe's. A run uses one thread unless the recipe sets another number, because
    several processes use the cores better.
    """
    if "output" in recipe:
        raise ConfigError("output: a study has many runs; give --output FOLDER instead of output=")
    base = build_config({**recipe, "output": str(output)}, "recipe")
    if base.steps == 0 or base.evaluation.problems == 0:
        raise ConfigError("a study compares accuracies: steps and evaluation.problems must not be 0")
    runs = []
    checks = _PreflightChecks()
    for seed in range(base.seed, base.seed + seeds):
        for variant in dict.fromkeys(variants):
            folder = output / variant.replace("/", "_") / f"seed-{seed}"
            data = {**STUDY_DEFAULTS, **variant_recipe(recipe, variant)}
            config = build_config({**data, "seed": seed, "output": str(folder)}, f"variant {variant}")
            check_plugin_method(config)
            checks.check(config)
            runs.append(PlannedRun(variant, seed, config))
    return runs


class _PreflightChecks:
    """Checks each distinct config once: seed, method and learning rate do not affect the checks."""

    def __init__(self) -> None:
        self._checked: set[str] = set()

    def check(self, config: RunConfig) -> None:
        relevant = replace(config, seed=0, output="-", method=HacpoSettings(), learning=LearningSettings())
        key = config_to_yaml(relevant)
        if key in self._checked:
            return
        task = make_task(config.task)
        try:
            if not preflight(config, task).test:
                raise ConfigError(
                    f"a study compares accuracies, and task {task.name!r} holds out no problems: "
                    "give task.options.test or test_share"
                )
        finally:
            task.close()
        self._checked.add(key)


def run_study(
    runs: Sequence[PlannedRun],
    jobs: int,
    on_done: Callable[[PlannedRun, RunResult], None],
    overwrite: bool = False,
) -> dict[tuple[str, int], RunResult]:
    """Run the runs that are not finished, ``jobs`` at a time, and return the results of all runs."""
    results: dict[tuple[str, int], RunResult] = {}

    def keep(run: PlannedRun) -> None:
        results[run.variant, run.seed] = _result(run)
        on_done(run, results[run.variant, run.seed])

    for run in runs:
        check_inside(run.folder, run.folder.parent.parent)  # the study's folder of FOLDER/VARIANT/seed-N
    finished = [_is_finished(run, overwrite) for run in runs]  # check all runs first
    missing = [run for run, done in zip(runs, finished, strict=True) if not done]
    for run, done in zip(runs, finished, strict=True):
        if done:
            keep(run)
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_exit_with_parent, initargs=(os.getpid(),)
    )
    try:
        futures = {
            pool.submit(_run, run.config if jobs == 1 else _with_fixed_micro_batches(run.config)): run
            for run in missing
        }
        for future in as_completed(futures):
            future.result()
            keep(futures[future])
    except BaseException:  # a failed run or Ctrl-C ends the study: start no further run
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return results


def _is_finished(run: PlannedRun, overwrite: bool) -> bool:
    """Return whether this config has run to its end: saving the agents is a run's last action."""
    config = run.folder / "config.yaml"
    if not os.path.lexists(config):
        return False
    if changed := _changed_settings(config, run):
        if overwrite:
            return False
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({', '.join(changed)}); use another "
            "--output, or --overwrite to replace such runs"
        )
    return all((run.folder / "agents" / agent.name / "config.json").is_file() for agent in run.config.agents)


def _changed_settings(path: Path, run: PlannedRun) -> list[str]:
    """Return the settings that differ, except those that affect rounding only."""
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


def _exit_with_parent(parent: int) -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="hacrl-parent", daemon=True).start()


def _run(config: RunConfig) -> None:
    from hacrl.runs.run import run_locally
    from hacrl.tracking.library_bars import library_bars_off

    with library_bars_off():
        run_locally(config, overwrite=True)
