"""Runs of the same agents under different methods, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from hacrl.evaluation.accuracy import Accuracy
from hacrl.execution.results import RunResult
from hacrl.report.literal import literal


@dataclass(frozen=True)
class AgentOutcome:
    """One agent under one method."""

    before: Accuracy
    after: Accuracy
    rollouts: int  # the agent's own training rollouts
    updates: int
    rewards: tuple[float, ...]  # mean training reward per step


@dataclass(frozen=True)
class Comparison:
    """Method -> agent -> outcome; all methods started from the same agents and asked the same problems."""

    outcomes: dict[str, dict[str, AgentOutcome]]

    @property
    def methods(self) -> list[str]:
        """Methods, in the order they were run."""
        return list(self.outcomes)

    @property
    def agents(self) -> list[str]:
        """Agents, in the recipe's order."""
        return list(next(iter(self.outcomes.values())))

    def before(self, agent: str) -> Accuracy:
        """Accuracy before any training, the same for all methods."""
        return self.outcomes[self.methods[0]][agent].before

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: agent -> before, and per method after, rollouts and updates."""
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
    """Gather finished runs, one per method, each evaluated before and after training."""
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
    """Accuracy before and after, by method; rollouts are each agent's own."""
    table = Table(title="Sampled accuracy on held-out problems (± standard error)")
    table.add_column("agent")
    table.add_column("before", justify="right")
    for method in comparison.methods:
        table.add_column(labels[method], justify="right")
    table.add_column("rollouts per agent", justify="right")
    for agent in comparison.agents:
        afters = [comparison.outcomes[method][agent].after for method in comparison.methods]
        best = max(after.mean for after in afters)
        cells = [_bold(f"{after.mean:.3f} ± {after.stderr:.3f}", after.mean == best) for after in afters]
        spent = sorted({comparison.outcomes[method][agent].rollouts for method in comparison.methods})
        before = comparison.before(agent)
        table.add_row(
            literal(agent), f"{before.mean:.3f}", *cells, " / ".join(f"{count:,}" for count in spent)
        )
    return table


def _bold(text: str, emphasised: bool) -> str:
    return f"[bold]{text}[/bold]" if emphasised else text
