"""From judged responses of one agent to one benchmark to the numbers that are reported.

What an evaluation found: one score per agent and benchmark, and how training changed them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from hacrl.evaluation.chunks import ChunkPlan
from hacrl.evaluation.metrics import Estimate, average_at, best_at, paired_change, pass_at, problem_average
from hacrl.types import FinishReason, VerdictLabel


@dataclass(frozen=True, slots=True)
class Mark:
    """What is kept in memory of one response: everything but its text."""

    problem: str  # id
    sample: int
    reward: float
    verdict: VerdictLabel
    tokens: int  # 0: the prompt left no room for a response
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Score:
    """One agent on one benchmark."""

    problems: int
    samples: int  # k of avg@k
    max_new_tokens: int
    average: Estimate
    pass_at: dict[int, Estimate]  # empty where rewards are scores, not right or wrong
    best_at: dict[int, Estimate]
    stopped: float  # share of responses that ended by themselves
    mean_tokens: float
    verdicts: dict[VerdictLabel, int]
    shortened: int  # problems whose prompt left less room than max_new_tokens
    unanswered: int  # problems whose prompt left no room: counted as wrong
    problem_averages: tuple[float, ...]  # for changes, which are paired by problem

    def as_dict(self) -> dict[str, Any]:
        """As in results.json."""
        record = asdict(self)
        del record["problem_averages"]
        return record


def score(marks: Sequence[Mark], plan: ChunkPlan, ks: Iterable[int]) -> Score:
    """Sum up the marks of one pair, given in the order of its plan."""
    rewards = by_problem(marks, plan)
    counts = Counter(mark.verdict for mark in marks)
    judged = not counts["scored"]
    asked = sorted(set(ks))
    return Score(
        problems=len(rewards),
        samples=len(rewards[0]),
        max_new_tokens=plan.max_new_tokens,
        average=average_at(rewards),
        pass_at={k: pass_at(rewards, k) for k in asked} if judged else {},
        best_at={k: best_at(rewards, k) for k in asked},
        stopped=sum(mark.finish_reason == "stop" for mark in marks) / len(marks),
        mean_tokens=math.fsum(mark.tokens for mark in marks) / len(marks),
        verdicts={label: counts[label] for label in get_args(VerdictLabel)},
        shortened=len(plan.shortened),
        unanswered=len(plan.unanswered),
        problem_averages=tuple(problem_average(values) for values in rewards),
    )


def by_problem(marks: Sequence[Mark], plan: ChunkPlan) -> list[list[float]]:
    """Rewards per problem, in the order of the problems and of their samples."""
    slots = [slot for chunk in plan.chunks for slot in chunk.slots]
    ordered = sorted(zip(slots, marks, strict=True), key=lambda pair: pair[0])
    rewards: list[list[float]] = []
    for (position, _), mark in ordered:
        if position == len(rewards):
            rewards.append([])
        rewards[position].append(mark.reward)
    return rewards


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
