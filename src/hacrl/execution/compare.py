"""The same recipe under several variants and seeds, a process each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from hacrl.config.loading import build_config, config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.execution.preflight import preflight
from hacrl.execution.results import RunResult, read_result
from hacrl.execution.variants import Recipe, variant_recipe


@dataclass(frozen=True)
class PlannedRun:
    """One cell of a study."""

    variant: str
    seed: int
    config: RunConfig


def plan_runs(
    recipe: Recipe, variants: Sequence[str], seeds: Sequence[int], output: Path
) -> list[PlannedRun]:
    """All runs of a study, every config checked; equal seeds are asked the same problems."""
    runs = []
    for seed in seeds:
        for variant in variants:
            data = variant_recipe(recipe, variant)
            folder = output / variant.replace("/", "_") / f"seed-{seed}"
            # One thread each: processes are the better use of cores, and results do not depend on them.
            data |= {"seed": seed, "output": str(folder), "threads": 1, "logged_rollouts": 0}
            config = build_config(data, f"variant {variant}")
            preflight(config)
            runs.append(PlannedRun(variant, seed, config))
    return runs


def run_study(
    runs: Sequence[PlannedRun], jobs: int, on_done: Callable[[PlannedRun, RunResult], None]
) -> dict[tuple[str, int], RunResult]:
    """Run what is not there yet, ``jobs`` at a time; what an earlier, broken-off study finished is kept."""
    results: dict[tuple[str, int], RunResult] = {}

    def keep(run: PlannedRun, result: RunResult) -> None:
        results[run.variant, run.seed] = result
        on_done(run, result)

    missing = []
    for run in runs:
        if _is_finished(run):
            keep(run, read_result(Path(run.config.output)))
        else:
            missing.append(run)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_run_one, run.config): run for run in missing}
        for future in as_completed(futures):
            future.result()
            run = futures[future]
            keep(run, read_result(Path(run.config.output)))
    return results


def _is_finished(run: PlannedRun) -> bool:
    """Whether the same config has been run to its end: its last act is to save the agents."""
    folder = Path(run.config.output)
    config = folder / "config.yaml"
    saved = all((folder / "agents" / agent.name / "config.json").is_file() for agent in run.config.agents)
    return saved and config.read_text("utf-8") == config_to_yaml(run.config)


def _run_one(config: RunConfig) -> None:
    from hacrl.execution.local import run_locally

    run_locally(config, overwrite=True)
