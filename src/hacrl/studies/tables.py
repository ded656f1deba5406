"""The table of the demo: methods on the same agents, one run each (``study.py`` has studies over seeds)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

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
