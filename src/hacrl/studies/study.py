"""The numbers of a study: every variant, agent and measure over all seeds, tested against a reference.

The measures are the run's own accuracy on held-out problems and, with ``hacrl compare --on``, benchmarks: the
mean of sampled responses, pass@k, and greedy responses. Variants are paired by seed: runs of one seed begin
from the same agents and see the same problems. All p-values of one measure are corrected together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hacrl.report.benchmark_tables import BEFORE, Score
from hacrl.report.statistics import POWER, TEST, PairedDifference, holm, paired_difference
from hacrl.runs.results import RunResult

HELD_OUT = "held-out accuracy"  # the run's own evaluation
MEAN = "mean of agents"  # no agent's name has a space

RunKey = tuple[str, int]  # variant and seed
BySeed = tuple[float | None, ...]  # in the order of the study's seeds; None: not measured


@dataclass(frozen=True)
class Outcome:
    """One agent, or the mean over agents, under one variant: one measure after training."""

    by_seed: BySeed
    mean: float | None  # over seeds
    std: float | None  # of a sample; None for a single seed
    difference: PairedDifference | None  # from the reference, paired by seed; None: it is the reference
    p_corrected: float | None = None  # Holm's method over all tests of the measure


@dataclass(frozen=True)
class Measure:
    """One measure: agent -> value before training, and variant -> agent -> outcome."""

    name: str
    before: dict[str, Outcome]
    outcomes: dict[str, dict[str, Outcome]]


@dataclass(frozen=True)
class Study:
    """All numbers of a study. Differences are from the variant ``reference``."""

    reference: str
    variants: tuple[str, ...]
    agents: tuple[str, ...]
    seeds: tuple[int, ...]
    measures: tuple[Measure, ...]
    costs: dict[str, dict[str, dict[str, tuple[float, ...]]]]  # variant -> agent -> cost -> by seed
    test: str = TEST
    power: float = POWER  # with which a test finds a true difference as large as ``detectable``

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; measures by name."""
        record = asdict(self)
        record["measures"] = {measure.pop("name"): measure for measure in record["measures"]}
        return record


# Cost -> what one run has spent on an agent.
COSTS: dict[str, Callable[[RunResult, str], float]] = {
    "rollouts": lambda run, agent: run.rollouts[agent],
    "generated tokens": lambda run, agent: run.generated_tokens.get(agent, 0),
    "learnt tokens": lambda run, agent: run.learnt_tokens.get(agent, 0),
    "probe tokens": lambda run, agent: run.probe_tokens.get(agent, 0),
    "updates": lambda run, agent: run.updates[agent],
    "seconds": lambda run, agent: run.seconds.get(agent, 0.0),
}


def make_study(
    results: Mapping[RunKey, RunResult],
    reference: str,
    scores: Mapping[RunKey, Sequence[Score]] | None = None,
) -> Study:
    """Return the study of finished runs. ``scores``: the runs' benchmarks, if they were evaluated on any."""
    variants = tuple(dict.fromkeys(variant for variant, _ in results))
    seeds = tuple(sorted({seed for _, seed in results}))
    agents = tuple(next(iter(results.values())).rewards)
    found = _values(results, scores or {})
    return Study(
        reference,
        variants,
        agents,
        seeds,
        tuple(_measure(name, values, reference, variants, agents, seeds) for name, values in found.items()),
        {
            variant: {
                agent: {
                    name: tuple(cost(results[variant, seed], agent) for seed in seeds)
                    for name, cost in COSTS.items()
                }
                for agent in agents
            }
            for variant in variants
        },
    )


# Variant (or BEFORE), seed and agent -> value of one measure.
_Values = dict[tuple[str, int, str], float]


def _values(
    results: Mapping[RunKey, RunResult], scores: Mapping[RunKey, Sequence[Score]]
) -> dict[str, _Values]:
    """Return the values of all measures."""
    own: _Values = {}
    found = {HELD_OUT: own}
    for (variant, seed), run in results.items():
        for step, stage in ((min(run.accuracies), BEFORE), (max(run.accuracies), variant)):
            for agent, accuracy in run.accuracies[step].items():
                own[stage, seed, agent] = accuracy.mean
    seeds = {seed for _, seed in results}
    for (variant, seed), of_run in scores.items():
        for score in of_run:
            values = found.setdefault(f"{score.benchmark} {score.measure}", {})
            if score.stage == BEFORE:  # evaluated once: all seeds begin from the same agents
                values |= {(BEFORE, other, score.agent): score.mean for other in seeds}
            else:
                values[variant, seed, score.agent] = score.mean
    return found


def _measure(
    name: str,
    values: _Values,
    reference: str,
    variants: Sequence[str],
    agents: Sequence[str],
    seeds: Sequence[int],
) -> Measure:
    def by_seed(variant: str, agent: str) -> BySeed:
        if agent != MEAN:
            return tuple(values.get((variant, seed, agent)) for seed in seeds)
        columns = [[values.get((variant, seed, one)) for one in agents] for seed in seeds]
        return tuple(_mean_of_all(column) for column in columns)

    columns = (*agents, MEAN)
    keys = [(variant, agent) for variant in variants if variant != reference for agent in columns]
    tests = {key: _difference(by_seed(*key), by_seed(reference, key[1])) for key in keys}
    p_values = holm([None if test is None else test.p_value for test in tests.values()])
    corrected = dict(zip(tests, p_values, strict=True))
    return Measure(
        name,
        {agent: _outcome(by_seed(BEFORE, agent)) for agent in columns},
        {
            variant: {
                agent: _outcome(
                    by_seed(variant, agent), tests.get((variant, agent)), corrected.get((variant, agent))
                )
                for agent in columns
            }
            for variant in variants
        },
    )


def _mean_of_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _difference(values: BySeed, reference: BySeed) -> PairedDifference | None:
    """Return the difference over the seeds that have both values; None if there is none."""
    pairs = [
        (own, other)
        for own, other in zip(values, reference, strict=True)
        if own is not None and other is not None
    ]
    return paired_difference(*map(list, zip(*pairs, strict=True))) if pairs else None


def _outcome(
    by_seed: BySeed, difference: PairedDifference | None = None, p_corrected: float | None = None
) -> Outcome:
    known = [value for value in by_seed if value is not None]
    mean = statistics.fmean(known) if known else None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Outcome(by_seed, mean, std, difference, p_corrected)
