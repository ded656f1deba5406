"""The tables of one run: results, what was learnt from whom, and time by phase."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from hacrl.report.benchmark_tables import run_benchmark_table
from hacrl.report.runs import RunData
from hacrl.report.statistics import NORMAL_QUANTILE
from hacrl.report.tables import Cell, Table


def run_tables(run: RunData, prefix: str = "", number: int = 0) -> list[Table]:
    """Return a run's tables; those without content are left out. ``number``: of the run in the report."""
    tables = [_results(run, prefix), _teaching(run, prefix), _time(run, prefix)]
    benchmarks = run_benchmark_table(run, f"{prefix}benchmarks")
    if benchmarks is not None:
        tables.append(benchmarks)
    return [replace(table, run=number) for table in tables if table.rows]


def _results(run: RunData, prefix: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for agent in run.agents:
        before, after = run.accuracy(agent, last=False), run.accuracy(agent, last=True)
        if before is None or after is None:
            continue
        gain = after["mean"] - before["mean"]
        error = NORMAL_QUANTILE * math.hypot(before["stderr"], after["stderr"])
        rollouts = run.spent_at(max(run.steps, default=0), agent)
        updates = int(sum(value or 0 for value in run.series(agent, "learning/updates")))
        rows.append(
            (
                agent,
                *_with_bounds(before),
                *_with_bounds(after),
                *(gain, gain - error, gain + error),
                *(rollouts, updates),
            )
        )
    last = run.evaluations[-1]["step"] if run.evaluations else 0
    bounds = ("low", "high")
    return Table(
        f"{prefix}results",
        f"Held-out accuracy before and after {last} steps: {run.name}",
        (
            *("agent", "before", *(f"before, {bound}" for bound in bounds)),
            *("after", *(f"after, {bound}" for bound in bounds)),
            *("gain", *(f"gain, {bound}" for bound in bounds), "rollouts", "updates"),
        ),
        tuple(rows),
        "Low and high: 95% confidence, normal approximation over problems. The gain's interval treats the "
        "two evaluations as independent, which is wide: they use the same problems.",
        kind="results",
    )


def _with_bounds(accuracy: dict[str, float]) -> tuple[float, float, float]:
    error = NORMAL_QUANTILE * accuracy["stderr"]
    return accuracy["mean"], accuracy["mean"] - error, accuracy["mean"] + error


def _teaching(run: RunData, prefix: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for learner in run.agents:
        for source in run.agents:
            pair = run.pairs.get(learner, {}).get(source)
            if pair is None:
                continue
            used = [value or 0.0 for value in pair.get("used", [])]
            sums: dict[str, float] = defaultdict(float)
            for name in ("clipped", "clipped_above", "ratio_mean"):
                for count, value in zip(used, pair.get(name, []), strict=False):
                    sums[name] += count * (value or 0.0)
            count = sum(used)
            gradients = [value for value in pair.get("gradient", []) if value is not None]
            rows.append(
                (
                    learner,
                    source,
                    int(count),
                    sums["ratio_mean"] / count if count else None,
                    (sums["clipped"] - sums["clipped_above"]) / count if count else None,
                    sums["clipped_above"] / count if count else None,
                    int(sum(value or 0 for value in pair.get("dropped", []))),
                    int(sum(value or 0 for value in pair.get("left_out", []))),
                    sum(gradients) / len(run.steps) if gradients and run.steps else None,
                )
            )
    return Table(
        f"{prefix}teaching",
        f"Who taught whom: {run.name}",
        (
            *("learner", "source", "uses", "mean ratio"),
            *("clipped below", "clipped above", "dropped", "over limit", "share of gradient"),
        ),
        tuple(rows),
        "Uses: rollouts in updates. Clipped: share of the uses without gradient. Share of gradient: mean "
        "over steps of the source's part of the sum of |dL/d log pi| over all tokens.",
        kind="teaching",
    )


def _time(run: RunData, prefix: str) -> Table:
    whole = sum(value or 0.0 for value in run.seconds.get("whole", []))
    rows: list[tuple[Cell, ...]] = []
    for name, values in sorted(run.seconds.items()):
        phase, _, agent = name.partition("/")
        seconds = sum(value or 0.0 for value in values)
        if agent:
            rows.append((phase, agent, seconds, seconds / len(values), seconds / whole if whole else None))
    return Table(
        f"{prefix}time",
        f"Time by phase: {run.name}",
        ("phase", "agent", "seconds", "seconds per step", "share of a step"),
        tuple(rows),
        "Phases of agents that generate at the same time overlap.",
        kind="time",
    )
