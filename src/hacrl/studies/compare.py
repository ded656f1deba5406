"""The same recipe under several variants and seeds, a process each."""

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

from hacrl.config.load import build_config, config_to_yaml, read_recipe
from hacrl.config.schema import FEW_TOKENS, HacpoSettings, LearningSettings, RunConfig
from hacrl.errors import ConfigError
from hacrl.files import UnreadableFileError, check_inside
from hacrl.runs.preflight import preflight
from hacrl.runs.results import RunResult, read_finished
from hacrl.runs.resume import changes, changes_rounding_only
from hacrl.studies.variants import Recipe, variant_recipe
from hacrl.tasks.registry import make_task

# What a study's runs do without unless the recipe asks for it: a run that was broken off is begun again, so
# checkpoints would only fill the disk.
STUDY_DEFAULTS: Recipe = {
    "threads": 1,
    "logged_rollouts": 0,
    "keep_rollouts": "none",
    "checkpoint": {"every": 0},
}


PARENT_LOOKED_AFTER = 1.0  # seconds


@dataclass(frozen=True)
class PlannedRun:
    """One cell of a study."""

    variant: str
    seed: int
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Where the run is or will be."""
        return Path(self.config.output)


def plan_runs(recipe: Recipe, variants: Sequence[str], seeds: int, output: Path) -> list[PlannedRun]:
    """All runs of a study, every config checked; equal seeds are asked the same problems.

    Seeds count up from the recipe's. One thread each unless the recipe says otherwise: processes are the
    better use of cores.
    """
    if "output" in recipe:
        raise ConfigError("output: a study has many runs; say --output FOLDER instead of output=")
    base = build_config({**recipe, "output": str(output)}, "recipe")
    if base.steps == 0 or base.evaluation.problems == 0:
        raise ConfigError("a study compares accuracies: steps and evaluation.problems must not be 0")
    runs = []
    tasks = _Tasks()
    for seed in range(base.seed, base.seed + seeds):
        for variant in dict.fromkeys(variants):
            folder = output / variant.replace("/", "_") / f"seed-{seed}"
            data = {**STUDY_DEFAULTS, **variant_recipe(recipe, variant)}
            config = build_config({**data, "seed": seed, "output": str(folder)}, f"variant {variant}")
            tasks.check(config)
            runs.append(PlannedRun(variant, seed, config))
    return runs


class _Tasks:
    """Preflight of many alike runs: seed, method and learning rate change nothing of what it looks at."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def check(self, config: RunConfig) -> None:
        same = replace(config, seed=0, output="-", method=HacpoSettings(), learning=LearningSettings())
        key = config_to_yaml(same)
        if key in self._seen:
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
        self._seen.add(key)


def run_study(
    runs: Sequence[PlannedRun],
    jobs: int,
    on_done: Callable[[PlannedRun, RunResult], None],
    overwrite: bool = False,
) -> dict[tuple[str, int], RunResult]:
    """Run what is not there yet, ``jobs`` at a time; what an earlier, broken-off study finished is kept."""
    results: dict[tuple[str, int], RunResult] = {}

    def keep(run: PlannedRun) -> None:
        results[run.variant, run.seed] = _result(run)
        on_done(run, results[run.variant, run.seed])

    for run in runs:
        check_inside(run.folder, run.folder.parent.parent)  # of the study: FOLDER/VARIANT/seed-N
    finished = [_is_finished(run, overwrite) for run in runs]  # of all, before any is announced or started
    missing = [run for run, done in zip(runs, finished, strict=True) if not done]
    for run, done in zip(runs, finished, strict=True):
        if done:
            keep(run)
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_depend_on, initargs=(os.getpid(),)
    )
    try:
        futures = {
            pool.submit(_run_one, run.config if jobs == 1 else _among_others(run.config)): run
            for run in missing
        }
        for future in as_completed(futures):
            future.result()
            keep(futures[future])
    except BaseException:  # one failed run, or Ctrl-C, ends the study: no further run is started
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return results


def _is_finished(run: PlannedRun, overwrite: bool) -> bool:
    """Whether this very config has been run to its end: a run's last act is to save the agents."""
    config = run.folder / "config.yaml"
    if not os.path.lexists(config):
        return False
    if others := _other_settings(config, run):
        if overwrite:
            return False
        raise ConfigError(
            f"{run.folder} holds a run with other settings ({', '.join(others)}) and is kept; use another "
            "--output, or --overwrite to replace such runs"
        )
    return all((run.folder / "agents" / agent.name / "config.json").is_file() for agent in run.config.agents)


def _other_settings(path: Path, run: PlannedRun) -> list[str]:
    """Keys whose values were others, but for those that change sums in their last digits at most."""
    try:
        began = build_config(read_recipe(path, run.folder), str(path))
    except ConfigError as error:
        return [str(error)]
    return [key for key in changes(began, run.config) if not changes_rounding_only(key)]


def _among_others(config: RunConfig) -> RunConfig:
    """Runs that share a device with others do not choose as if it were theirs alone."""
    tokens = config.learning.micro_batch_tokens or FEW_TOKENS
    return replace(config, learning=replace(config.learning, micro_batch_tokens=tokens))


def _result(run: PlannedRun) -> RunResult:
    """What a finished run came to. Half of it would be compared as if it were the whole."""
    try:
        return read_finished(run.folder, run.config.steps, [agent.name for agent in run.config.agents])
    except UnreadableFileError as error:
        raise ConfigError(f"{error}; delete {run.folder} to have this run made again") from error


def _depend_on(parent: int) -> None:
    """Ctrl-C reaches the whole group, but the parent decides what becomes of a worker, which ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOKED_AFTER)
        os._exit(1)

    threading.Thread(target=watch, name="hacrl-parent", daemon=True).start()


def _run_one(config: RunConfig) -> None:
    from transformers.utils import logging

    from hacrl.runs.run import run_locally

    logging.disable_progress_bar()
    run_locally(config, overwrite=True)
