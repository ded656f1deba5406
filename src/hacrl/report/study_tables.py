"""The tables of a study: several variants of one recipe, each with the same seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacrl.files import MissingFileError, read_json
from hacrl.report.ablation_tables import ablation_tables, spread_over_seeds
from hacrl.report.benchmark_tables import study_benchmark_tables
from hacrl.report.runs import RunData
from hacrl.report.statistics import TEST, holm, mean_interval, paired_difference
from hacrl.report.tables import Cell, Spread, Table

MEAN = "mean"  # the column that averages over agents
# What a method costs one agent: column -> metric that is summed over steps.
COSTS = {
    "rollouts": "rollout/rollouts",
    "generated tokens": "rollout/tokens",
    "learnt tokens": "learning/tokens",
    "updates": "learning/updates",
}


@dataclass(frozen=True)
class StudyRuns:
    """Runs by variant and seed; every variant has every seed and every agent a final accuracy."""

    runs: dict[tuple[str, int], RunData]
    variants: tuple[str, ...]  # differences are from the first one

    @property
    def reference(self) -> str:
        """The variant that differences are from."""
        return self.variants[0]

    @property
    def seeds(self) -> list[int]:
        """All seeds in increasing order."""
        return sorted({seed for _, seed in self.runs})

    @property
    def agents(self) -> list[str]:
        """The agents in the recipe's order."""
        return next(iter(self.runs.values())).agents

    def finals(self, variant: str, agent: str) -> list[float]:
        """Return the last accuracy of an agent, or the mean over agents, one for each seed."""
        agents = self.agents if agent == MEAN else [agent]
        return [
            statistics.fmean(self._accuracy(variant, seed, name, last=True) for name in agents)
            for seed in self.seeds
        ]

    def finals_of_all(self, variant: str) -> list[float]:
        """Return the mean over agents of the last accuracy, one for each seed."""
        return self.finals(variant, MEAN)

    def before(self, agent: str) -> float:
        """Return the accuracy before training, a mean over seeds."""
        agents = self.agents if agent == MEAN else [agent]
        return statistics.fmean(
            self._accuracy(self.reference, seed, name, last=False) for seed in self.seeds for name in agents
        )

    def _accuracy(self, variant: str, seed: int, agent: str, last: bool) -> float:
        accuracy = self.runs[variant, seed].accuracy(agent, last)
        assert accuracy is not None, "find_study has checked it"
        return float(accuracy["mean"])


def find_study(runs: Sequence[RunData]) -> StudyRuns | None:
    """Return the runs as a study; None if they are not several variants with the same seeds and agents.

    Seeds that are not finished under every variant are left out. ``study.json`` says which variant is the
    reference; without one the first run's is, and two seeds make a study.
    """
    complete = {
        (run.variant, run.seed): run
        for run in runs
        if run.evaluations and all(run.accuracy(agent, last=True) for agent in run.agents)
    }
    named = _named_variants(runs)
    found = dict.fromkeys(variant for variant, _ in complete)
    variants = tuple(sorted(found, key=lambda name: named.index(name) if name in named else len(named)))
    seeds = [seed for seed in {seed for _, seed in complete} if all((v, seed) in complete for v in variants)]
    if (
        len(variants) < 2
        or len(seeds) < (1 if named else 2)
        or len({tuple(run.agents) for run in complete.values()}) > 1
    ):
        return None
    shared = {key: run for key, run in complete.items() if key[1] in seeds}
    return StudyRuns(shared, variants)


def _named_variants(runs: Sequence[RunData]) -> list[str]:
    """Return the names of the variants' folders in the order of ``study.json``, the reference first."""
    for folder in {run.folder.parent.parent for run in runs}:
        try:
            study = read_json(folder / "study.json", folder)
        except MissingFileError:
            continue
        names = study.get("variants") if isinstance(study, dict) else None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            order = sorted(names, key=lambda name: name != study.get("reference"))
            return [name.replace("/", "_") for name in order]
    return []


def study_tables(study: StudyRuns) -> list[Table]:
    """Return results by method and benchmark, ablations, differences from the reference, values by seed."""
    return [
        _results(study),
        *study_benchmark_tables(list(study.runs.values()), study.agents, study.variants),
        *ablation_tables(study),
        _differences(study),
        _seeds(study),
    ]


def _results(study: StudyRuns) -> Table:
    columns = [*study.agents, MEAN]
    rows: list[tuple[Cell, ...]] = [
        ("before", *(Spread(study.before(agent), None) for agent in columns), *(0 for _ in COSTS))
    ]
    for variant in study.variants:
        finals = [spread_over_seeds(study.finals(variant, agent)) for agent in columns]
        run = study.runs[variant, study.seeds[0]]
        costs = [max(int(_total(run, a, name)) for a in study.agents) for name in COSTS.values()]
        rows.append((variant, *finals, *costs))
    return Table(
        "study-results",
        "Held-out accuracy by method",
        ("method", *columns, *COSTS),
        tuple(rows),
        f"±: standard deviation over {len(study.seeds)} seeds. Costs are per agent, of the first seed.",
        kind="study",
    )


def _total(run: RunData, agent: str, metric: str) -> float:
    return sum(value or 0 for value in run.series(agent, metric))


def _differences(study: StudyRuns) -> Table:
    keys, found = [], []
    for variant in study.variants[1:]:
        for agent in [*study.agents, MEAN]:
            keys.append((variant, agent))
            found.append(
                paired_difference(study.finals(variant, agent), study.finals(study.reference, agent))
            )
    corrected = holm([difference.p_value for difference in found])
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (*key, difference.mean, difference.low, difference.high, difference.p_value, p, difference.pairs)
        for key, difference, p in zip(keys, found, corrected, strict=True)
    )
    return Table(
        "study-differences",
        f"Difference from {study.reference}, paired by seed",
        ("method", "agent", "difference", "low", "high", "p", "p, corrected", "seeds"),
        rows,
        f"Low and high: 95% confidence, Student's t. Test: {TEST}.",
        kind="study",
    )


def _seeds(study: StudyRuns) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (variant, seed, *(study.finals(variant, agent)[i] for agent in [*study.agents, MEAN]))
        for variant in study.variants
        for i, seed in enumerate(study.seeds)
    )
    return Table(
        "study-seeds",
        "Held-out accuracy by seed",
        ("method", "seed", *study.agents, MEAN),
        rows,
        kind="study",
    )


def study_curves(study: StudyRuns) -> list[dict[str, Any]]:
    """Return accuracy against rollouts: by agent and variant the mean, its interval, and every seed."""
    curves = []
    for agent in study.agents:
        for variant in study.variants:
            runs = [study.runs[variant, seed] for seed in study.seeds]
            steps = [line["step"] for line in runs[0].evaluations if agent in line["agents"]]
            by_seed = [
                [line["agents"][agent]["mean"] for line in run.evaluations if agent in line["agents"]]
                for run in runs
            ]
            if any(len(values) != len(steps) for values in by_seed):
                continue  # runs with another number of evaluations have no common curve
            intervals = [mean_interval([values[i] for values in by_seed]) for i in range(len(steps))]
            curves.append(
                {
                    "agent": agent,
                    "variant": variant,
                    "rollouts": [runs[0].spent_at(step, agent) for step in steps],
                    "steps": steps,
                    "mean": [interval.mean for interval in intervals],
                    "low": [interval.low for interval in intervals],
                    "high": [interval.high for interval in intervals],
                    "seeds": by_seed,
                }
            )
    return curves
