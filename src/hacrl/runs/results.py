"""Accuracies, rewards and costs of a run: collected while it trains, or read from its folder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hacrl.files import JsonLines, MissingFileError, Record, UnreadableFileError, as_record, read_jsonl
from hacrl.training.metrics import Accuracy, AgentReport, StepReport
from hacrl.training.observer import Observer


@dataclass
class RunResult(Observer):
    """Accuracies, rewards and costs of one run."""

    folder: Path
    accuracies: dict[int, dict[str, Accuracy]] = field(default_factory=dict)  # step -> agent -> accuracy
    rewards: dict[str, list[float]] = field(default_factory=dict)  # agent -> mean reward per step
    rollouts: dict[str, int] = field(default_factory=dict)  # agent -> number of training rollouts
    updates: dict[str, int] = field(default_factory=dict)  # agent -> number of parameter updates
    generated_tokens: dict[str, int] = field(default_factory=dict)  # agent -> of its training rollouts
    learnt_tokens: dict[str, int] = field(default_factory=dict)  # agent -> that its losses saw, at every use
    probe_tokens: dict[str, int] = field(default_factory=dict)  # agent -> run only to measure gradients
    seconds: dict[str, float] = field(default_factory=dict)  # agent -> of its phases, evaluations left out
    notes: list[str] = field(default_factory=list)  # about the files it was read from

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Add one step."""
        for name, agent in report.agents.items():
            self.add(name, agent)
        self.add_seconds(seconds)

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Add one evaluation."""
        self.accuracies[step] = dict(accuracies)

    def add(self, name: str, agent: AgentNumbers | AgentReport) -> None:
        """Add one step of one agent."""
        self.rewards.setdefault(name, []).append(agent.rollout.reward)
        for costs, spent in (
            (self.rollouts, agent.rollout.rollouts),
            (self.generated_tokens, agent.rollout.tokens),
            (self.updates, agent.learning.updates),
            (self.learnt_tokens, agent.learning.tokens),
            (self.probe_tokens, agent.learning.probe_tokens),
        ):
            costs[name] = costs.get(name, 0) + spent

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add one step's times, by "phase/agent"; the "whole" step is nobody's."""
        for key, value in seconds.items():
            phase, _, name = key.partition("/")
            if name and phase != "evaluate":
                self.seconds[name] = self.seconds.get(name, 0.0) + value


@dataclass(frozen=True)
class _Rollout:
    reward: float
    rollouts: int
    tokens: int = 0


@dataclass(frozen=True)
class _Learning:
    updates: int
    tokens: int = 0
    probe_tokens: int = 0


@dataclass(frozen=True)
class AgentNumbers:
    """The part of an agent's report that a result needs."""

    rollout: _Rollout
    learning: _Learning


@dataclass(frozen=True)
class MetricsLine:
    """The part of one line of metrics.jsonl that a result needs."""

    step: int
    agents: dict[str, AgentNumbers]


@dataclass(frozen=True)
class EvaluationLine:
    """One line of evaluations.jsonl."""

    step: int
    agents: dict[str, Accuracy]


def read_result(folder: Path) -> RunResult:
    """Return the result of a run so far, from its folder; an incomplete last line is ignored and noted."""
    return _read(folder)[0]


def read_start(folder: Path) -> dict[str, Accuracy]:
    """Return the accuracies before the first step; empty if the run has not got that far."""
    try:
        for _, line in _records(read_jsonl(folder / "evaluations.jsonl", folder), EvaluationLine):
            return line.agents if line.step == 0 else {}
    except MissingFileError:
        pass
    return {}


def read_finished(folder: Path, steps: int, agents: Collection[str]) -> RunResult:
    """Return the result of a finished run; raise if a step or a final accuracy is missing."""
    result, last = _read(folder)
    final = result.accuracies.get(steps, {})
    missing = sorted(set(agents) - final.keys())
    if last != steps:
        problem = f"metrics.jsonl ends after step {last} of {steps}"
    elif missing:
        problem = f"evaluations.jsonl has no accuracy of {', '.join(missing)} after step {steps}"
    else:
        return result
    raise UnreadableFileError(f"{folder} does not hold a complete run: {problem}")


def _read(folder: Path) -> tuple[RunResult, int]:
    """Return the result, and the last step in metrics.jsonl."""
    result, last = RunResult(folder), 0
    evaluations = read_jsonl(folder / "evaluations.jsonl", folder)
    for where, evaluation in _records(evaluations, EvaluationLine):
        if result.accuracies and evaluation.step <= max(result.accuracies):
            raise UnreadableFileError(
                f"{where} is damaged: step {evaluation.step} is repeated or out of order"
            )
        result.on_evaluation(evaluation.step, evaluation.agents)
    metrics = read_jsonl(folder / "metrics.jsonl", folder)
    for where, line in _records(metrics, MetricsLine):
        if line.step != last + 1:
            raise UnreadableFileError(f"{where} is damaged: step {line.step} follows step {last}")
        last = line.step
        for name, agent in line.agents.items():
            result.add(name, agent)
    if (folder / "timings.jsonl").exists():
        for times in read_jsonl(folder / "timings.jsonl", folder).lines:
            result.add_seconds(plain_seconds(times.record))
    result.notes += [lines.note for lines in (evaluations, metrics) if lines.note is not None]
    return result, last


def plain_seconds(record: Any) -> dict[str, float]:
    """Return the times of one line of timings.jsonl; what is no time is left out."""
    if not isinstance(record, dict):
        return {}
    return {key: value for key, value in record.items() if "/" in key and isinstance(value, int | float)}


def _records(lines: JsonLines, kind: type[Record]) -> Iterator[tuple[str, Record]]:
    for line in lines.lines:
        where = f"{lines.path}, line {line.number},"
        yield where, as_record(line.record, kind, where)
