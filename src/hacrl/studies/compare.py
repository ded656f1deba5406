"""Plan a study: one recipe under several variants and seeds, all configs checked before the first run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hacrl.config.checks import check_plugin_method
from hacrl.config.load import build_config, config_to_yaml
from hacrl.config.schema import HacpoSettings, LearningSettings, RunConfig
from hacrl.errors import ConfigError
from hacrl.runs.preflight import preflight
from hacrl.studies.variants import Recipe, variant_recipe
from hacrl.tasks.registry import make_task

# Defaults of a study's runs, which the recipe may override. Checkpoints of many runs would fill the disk, and
# without them an interrupted run starts again. A recipe of long runs sets checkpoint.every.
STUDY_DEFAULTS: Recipe = {
    "threads": 1,
    "logged_rollouts": 0,
    "keep_rollouts": "none",
    "checkpoint": {"every": 0},
}


@dataclass(frozen=True)
class PlannedRun:
    """One variant with one seed."""

    variant: str
    seed: int
    config: RunConfig

    @property
    def key(self) -> tuple[str, int]:
        """Variant and seed, which no other run of the study has."""
        return self.variant, self.seed

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
