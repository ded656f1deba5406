"""Tables that compare methods on the same agents.

A :class:`Comparison` has one run per method (the demo). A :class:`Study` has several seeds per variant, with
means, spread over seeds, and differences paired by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from hacrl.plain_text import markdown_text
from hacrl.runs.results import RunResult
from hacrl.tracking.console import unstyled
from hacrl.training.metrics import Accuracy


@dataclass(frozen=True)
class AgentOutcome:
    """The result of one agent under one method."""

    before: Accuracy
    after: Accuracy
    rollouts: int  # the agent's own training rollouts
    updates: int
    rewards: tuple[float, ...]  # mean training reward per step


@dataclass(frozen=True)
class Comparison:
    """Method -> agent -> outcome. All methods started from the same agents and used the same problems."""

    outcomes: dict[str, dict[str, AgentOutcome]]

    @property
    def methods(self) -> list[str]:
        """The methods in the order of their runs."""
        return list(self.outcomes)

    @property
    def agents(self) -> list[str]:
        """The agents in the recipe's order."""
        return list(next(iter(self.outcomes.values())))

    def before(self, agent: str) -> Accuracy:
        """Return the accuracy before training, which is the same for all methods."""
        return self.outcomes[self.methods[0]][agent].before

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: agent -> before, and per method after, rollouts and updates."""
        return {
            agent: {
                "before": asdict(self.before(agent)),
                **{
                    method: {
                        "after": asdict(outcomes[agent].after),
                        "rollouts": outcomes[agent].rollouts,
                        "updates": outcomes[agent].updates,
                    }
                    for method, outcomes in self.outcomes.items()
                },
            }
            for agent in self.agents
        }


def compare(results: Mapping[str, RunResult]) -> Comparison:
    """Return the comparison of finished runs, one per method, each evaluated before and after training."""
    return Comparison({method: _outcomes(result) for method, result in results.items()})


def _outcomes(result: RunResult) -> dict[str, AgentOutcome]:
    first, last = min(result.accuracies), max(result.accuracies)
    return {
        agent: AgentOutcome(
            before=result.accuracies[first][agent],
            after=result.accuracies[last][agent],
            rollouts=result.rollouts[agent],
            updates=result.updates[agent],
            rewards=tuple(result.rewards[agent]),
        )
        for agent in result.rewards
    }


def comparison_table(comparison: Comparison, labels: Mapping[str, str]) -> Table:
    """Return a table of accuracy before and after training by method, with each agent's own rollouts."""
    table = Table(title="Sampled accuracy on held-out problems (± standard error)")
    table.add_column("agent")
    table.add_column("before", justify="right")
    for method in comparison.methods:
        table.add_column(labels[method], justify="right")
    table.add_column("rollouts per agent", justify="right")
    for agent in comparison.agents:
        afters = [comparison.outcomes[method][agent].after for method in comparison.methods]
        best = max(after.mean for after in afters)
        cells = [_bold_if(after.mean == best, f"{after.mean:.3f} ± {after.stderr:.3f}") for after in afters]
        rollouts = sorted({comparison.outcomes[method][agent].rollouts for method in comparison.methods})
        before = comparison.before(agent)
        table.add_row(
            unstyled(agent), f"{before.mean:.3f}", *cells, " / ".join(f"{count:,}" for count in rollouts)
        )
    return table


def _bold_if(condition: bool, text: str) -> str:
    return f"[bold]{text}[/bold]" if condition else text


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None  # None for a single seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.std:.3f}" if self.std is not None else "")


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of one value per seed."""
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, len(values))


@dataclass(frozen=True)
class StudyCell:
    """The results of one agent under one variant, over all seeds."""

    before: Spread
    after: Spread
    before_by_seed: tuple[float, ...]  # in the order of the study's seeds
    after_by_seed: tuple[float, ...]
    difference: Spread  # from the reference variant, paired by seed
    wins: int  # seeds in which the variant ended above the reference
    # costs of the agent, means over seeds
    rollouts: int
    updates: int
    generated_tokens: int
    learnt_tokens: int  # counted at every use
    seconds: float  # of its phases: they depend on the machine and on what else runs on it


@dataclass(frozen=True)
class Study:
    """Variant -> agent -> cell. Differences are from the variant ``reference``."""

    reference: str
    seeds: tuple[int, ...]
    cells: dict[str, dict[str, StudyCell]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def make_study(results: Mapping[tuple[str, int], RunResult], reference: str) -> Study:
    """Aggregate the runs over seeds; keys are (variant, seed)."""
    variants = list(dict.fromkeys(variant for variant, _ in results))
    seeds = sorted({seed for _, seed in results})
    agents = list(next(iter(results.values())).rewards)

    def final(variant: str, agent: str) -> list[float]:
        runs = [results[variant, seed] for seed in seeds]
        return [run.accuracies[max(run.accuracies)][agent].mean for run in runs]

    def cell(variant: str, agent: str) -> StudyCell:
        after, baseline = final(variant, agent), final(reference, agent)
        differences = [own - other for own, other in zip(after, baseline, strict=True)]
        runs = [results[variant, seed] for seed in seeds]
        before = [results[variant, seed].accuracies[0][agent].mean for seed in seeds]
        return StudyCell(
            before=spread(before),
            after=spread(after),
            before_by_seed=tuple(before),
            after_by_seed=tuple(after),
            difference=spread(differences),
            wins=sum(difference > 0 for difference in differences),
            rollouts=round(statistics.fmean(run.rollouts[agent] for run in runs)),
            updates=round(statistics.fmean(run.updates[agent] for run in runs)),
            generated_tokens=round(statistics.fmean(run.generated_tokens.get(agent, 0) for run in runs)),
            learnt_tokens=round(statistics.fmean(run.learnt_tokens.get(agent, 0) for run in runs)),
            seconds=statistics.fmean(run.seconds.get(agent, 0.0) for run in runs),
        )

    cells = {variant: {agent: cell(variant, agent) for agent in agents} for variant in variants}
    return Study(reference, tuple(seeds), cells)


# Columns of a study's table -> attribute of a cell: what a method costs one agent.
COSTS = {
    "rollouts": "rollouts",
    "generated tokens": "generated_tokens",
    "learnt tokens": "learnt_tokens",
    "updates": "updates",
    "seconds": "seconds",
}


def study_markdown(study: Study) -> str:
    """Return Markdown with a row per variant and a column per agent; costs are of the agent with the most."""
    agents = list(next(iter(study.cells.values())))
    seeds = next(iter(study.cells[study.reference].values())).after.seeds
    lines = [
        "| variant | " + " | ".join(map(markdown_text, agents)) + f" | mean | {' | '.join(COSTS)} |",
        "|---|" + "---|" * (len(agents) + 1 + len(COSTS)),
    ]
    before = [study.cells[study.reference][agent].before for agent in agents]
    mean_before = statistics.fmean(value.mean for value in before)
    nothing = " | ".join("0" for _ in COSTS)
    lines.append("| before | " + " | ".join(map(str, before)) + f" | {mean_before:.3f} | {nothing} |")
    for variant, cells in study.cells.items():
        values = " | ".join(_cell_text(cells[agent], variant != study.reference) for agent in agents)
        mean = statistics.fmean(cells[agent].after.mean for agent in agents)
        costs = " | ".join(
            f"{max(getattr(cell, attribute) for cell in cells.values()):,.0f}" for attribute in COSTS.values()
        )
        lines.append(f"| {markdown_text(variant)} | {values} | {mean:.3f} | {costs} |")
    note = (
        f"Mean ± standard deviation over {seeds} seeds. In brackets: the mean paired difference from "
        f"{markdown_text(study.reference)}, and in how many seeds it is positive."
    )
    return "\n".join([*lines, "", note])


def _cell_text(cell: StudyCell, with_difference: bool) -> str:
    if not with_difference:
        return str(cell.after)
    return f"{cell.after} ({cell.difference.mean:+.3f}, {cell.wins}/{cell.difference.seeds})"
