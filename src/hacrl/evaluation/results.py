"""What an evaluation found: one score per agent and benchmark, and how training changed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from hacrl.evaluation.metrics import Estimate, paired_change
from hacrl.evaluation.scores import Score

FORMAT = 1  # of results.json; goes up when a field changes its meaning


@dataclass(frozen=True)
class PairResult:
    """One agent on one benchmark."""

    label: str  # unique among the models of an evaluation, e.g. "small (before)"
    agent: str
    stage: str | None  # of a run's agents: "before" or "after" training
    run: str | None
    model: str
    benchmark: str
    source: str
    temperature: float
    top_p: float
    score: Score

    def as_dict(self) -> dict[str, Any]:
        """As in results.json."""
        record = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "score"}
        return {**record, **self.score.as_dict()}


@dataclass(frozen=True)
class Change:
    """How training changed one agent's average on one benchmark, problem by problem."""

    agent: str
    run: str | None
    benchmark: str
    change: Estimate


@dataclass(frozen=True)
class Results:
    """All pairs that are done, in the order they were asked for."""

    pairs: tuple[PairResult, ...]
    seed: int
    notes: tuple[str, ...] = ()

    def changes(self) -> Iterator[Change]:
        """Of every agent that was evaluated before and after training."""
        before = {
            (pair.run, pair.agent, pair.benchmark): pair for pair in self.pairs if pair.stage == "before"
        }
        for after in self.pairs:
            earlier = before.get((after.run, after.agent, after.benchmark))
            if after.stage == "after" and earlier is not None:
                change = paired_change(earlier.score.problem_averages, after.score.problem_averages)
                yield Change(after.agent, after.run, after.benchmark, change)

    def as_dict(self) -> dict[str, Any]:
        """As in results.json."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "results": [pair.as_dict() for pair in self.pairs],
            "changes": [asdict(change) for change in self.changes()],
            "notes": list(self.notes),
        }
