"""Several variants over several seeds: means, spread over seeds, and paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hacrl.execution.results import RunResult
from hacrl.plain_text import markdown_text


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None  # None for a single seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.std:.3f}" if self.std is not None else "")


def spread(values: Sequence[float]) -> Spread:
    """Over seeds."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


@dataclass(frozen=True)
class StudyCell:
    """One agent under one variant."""

    before: Spread
    after: Spread
    difference: Spread  # to the reference variant, paired by seed
    wins: int  # seeds in which it ended above the reference
    rollouts: int
    updates: int


@dataclass(frozen=True)
class Study:
    """Variant -> agent -> cell; differences are to ``reference``."""

    reference: str
    cells: dict[str, dict[str, StudyCell]]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def make_study(results: Mapping[tuple[str, int], RunResult], reference: str) -> Study:
    """Aggregate runs keyed by (variant, seed)."""
    variants = list(dict.fromkeys(variant for variant, _ in results))
    seeds = sorted({seed for _, seed in results})
    agents = list(next(iter(results.values())).rewards)

    def final(variant: str, agent: str) -> list[float]:
        runs = [results[variant, seed] for seed in seeds]
        return [run.accuracies[max(run.accuracies)][agent].mean for run in runs]

    def cell(variant: str, agent: str) -> StudyCell:
        after, baseline = final(variant, agent), final(reference, agent)
        differences = [a - b for a, b in zip(after, baseline, strict=True)]
        first = results[variant, seeds[0]]
        return StudyCell(
            before=spread([results[variant, seed].accuracies[0][agent].mean for seed in seeds]),
            after=spread(after),
            difference=spread(differences),
            wins=sum(difference > 0 for difference in differences),
            rollouts=first.rollouts[agent],
            updates=first.updates[agent],
        )

    return Study(
        reference, {variant: {agent: cell(variant, agent) for agent in agents} for variant in variants}
    )


def study_markdown(study: Study) -> str:
    """One row per variant, one column per agent; rollouts and updates are per agent."""
    agents = list(next(iter(study.cells.values())))
    seeds = next(iter(study.cells[study.reference].values())).after.seeds
    lines = [
        "| variant | " + " | ".join(map(markdown_text, agents)) + " | mean | rollouts | updates |",
        "|---|" + "---|" * (len(agents) + 3),
    ]
    before = [study.cells[study.reference][agent].before for agent in agents]
    mean_before = statistics.fmean(value.mean for value in before)
    lines.append("| before | " + " | ".join(map(str, before)) + f" | {mean_before:.3f} | 0 | 0 |")
    for variant, cells in study.cells.items():
        values = " | ".join(_cell_text(cells[agent], variant != study.reference) for agent in agents)
        mean = statistics.fmean(cells[agent].after.mean for agent in agents)
        rollouts = max(cell.rollouts for cell in cells.values())
        updates = max(cell.updates for cell in cells.values())
        lines.append(f"| {markdown_text(variant)} | {values} | {mean:.3f} | {rollouts:,} | {updates:,} |")
    note = (
        f"Mean ± standard deviation over {seeds} seeds; in brackets the mean paired difference to "
        f"{markdown_text(study.reference)} and the seeds in which it was above."
    )
    return "\n".join([*lines, "", note])


def _cell_text(cell: StudyCell, with_difference: bool) -> str:
    if not with_difference:
        return str(cell.after)
    return f"{cell.after} ({cell.difference.mean:+.3f}, {cell.wins}/{cell.difference.seeds})"
