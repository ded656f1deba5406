"""The results of an evaluation: one score per model and benchmark, and how training changed the scores."""

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
class ScoredResponse:
    """One verified response without its text."""

    problem: str  # id
    sample: int
    reward: float
    verdict: VerdictLabel
    tokens: int  # 0: the prompt left no room for a response
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Score:
    """The metrics of one model on one benchmark."""

    problems: int
    samples: int  # k of avg@k
    max_new_tokens: int
    average: Estimate
    pass_at: dict[int, Estimate]  # empty if rewards are scores, without correct and wrong
    best_at: dict[int, Estimate]
    stopped: float  # share of responses that ended with a stop token
    mean_tokens: float
    verdicts: dict[VerdictLabel, int]
    shortened: int  # problems whose prompt left room for fewer than max_new_tokens
    unanswered: int  # problems whose prompt left no room for a response: counted as wrong
    problem_averages: tuple[float, ...]  # for changes, which pair values by problem

    def as_dict(self) -> dict[str, Any]:
        """Return the record that results.json holds."""
        record = asdict(self)
        del record["problem_averages"]
        return record


def score(responses: Sequence[ScoredResponse], plan: ChunkPlan, at: Iterable[int]) -> Score:
    """Return the metrics of one pair; its responses are in the order of the plan."""
    rewards = by_problem(responses, plan)
    counts = Counter(response.verdict for response in responses)
    has_verdicts = not counts["scored"]
    ks = sorted(set(at))
    return Score(
        problems=len(rewards),
        samples=len(rewards[0]),
        max_new_tokens=plan.max_new_tokens,
        average=average_at(rewards),
        pass_at={k: pass_at(rewards, k) for k in ks} if has_verdicts else {},
        best_at={k: best_at(rewards, k) for k in ks},
        stopped=sum(response.finish_reason != "length" for response in responses) / len(responses),
        mean_tokens=math.fsum(response.tokens for response in responses) / len(responses),
        verdicts={label: counts[label] for label in get_args(VerdictLabel)},
        shortened=len(plan.shortened),
        unanswered=len(plan.unanswered),
        problem_averages=tuple(problem_average(values) for values in rewards),
    )


def by_problem(responses: Sequence[ScoredResponse], plan: ChunkPlan) -> list[list[float]]:
    """Return the rewards per problem, in the order of the problems and of their samples."""
    slots = [slot for chunk in plan.chunks for slot in chunk.slots]
    ordered = sorted(zip(slots, responses, strict=True), key=lambda pair: pair[0])
    rewards: list[list[float]] = []
    for (position, _), response in ordered:
        if position == len(rewards):
            rewards.append([])
        rewards[position].append(response.reward)
    return rewards


FORMAT = 1  # of results.json; increased when a field changes its meaning


@dataclass(frozen=True)
class PairResult:
    """The result of one pair of model and benchmark."""

    label: str  # unique among the models of an evaluation, e.g. "small (before)"
    agent: str
    stage: str | None  # for a run's agents: "before" or "after" training
    run: str | None
    origin: str | None  # the run, or the study it belongs to, whose agents begin from the same models
    variant: str | None  # of a study's run: its method, perhaps with changed keys
    run_seed: int | None  # of a study's run
    model: str
    benchmark: str
    source: str
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    score: Score

    def as_dict(self) -> dict[str, Any]:
        """Return the record that results.json holds."""
        record = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "score"}
        return {**record, **self.score.as_dict()}


@dataclass(frozen=True)
class Change:
    """How training changed one agent's average on one benchmark, paired by problem."""

    label: str  # of the agent after training
    agent: str
    run: str | None
    benchmark: str
    change: Estimate


@dataclass(frozen=True)
class Results:
    """All finished pairs, in the order of the request."""

    pairs: tuple[PairResult, ...]
    seed: int
    notes: tuple[str, ...] = ()

    def changes(self) -> Iterator[Change]:
        """Yield the change of every agent that was evaluated before and after training."""
        before = {
            (pair.origin, pair.agent, pair.benchmark): pair for pair in self.pairs if pair.stage == "before"
        }
        for after in self.pairs:
            earlier = before.get((after.origin, after.agent, after.benchmark))
            if after.stage == "after" and earlier is not None:
                change = paired_change(earlier.score.problem_averages, after.score.problem_averages)
                yield Change(after.label, after.agent, after.run, after.benchmark, change)

    def as_dict(self) -> dict[str, Any]:
        """Return the record that results.json holds."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "results": [pair.as_dict() for pair in self.pairs],
            "changes": [asdict(change) for change in self.changes()],
            "notes": list(self.notes),
        }
