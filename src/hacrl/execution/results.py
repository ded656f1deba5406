"""What a run is judged by: collected while it happens, or read back from its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hacrl.errors import ConfigError
from hacrl.evaluation.accuracy import Accuracy
from hacrl.learning.observer import Observer
from hacrl.learning.reports import StepReport


@dataclass
class RunResult(Observer):
    """Accuracies, rewards and costs of one run."""

    folder: Path
    accuracies: dict[int, dict[str, Accuracy]] = field(default_factory=dict)  # step -> agent -> accuracy
    rewards: dict[str, list[float]] = field(default_factory=dict)  # agent -> mean reward per step
    rollouts: dict[str, int] = field(default_factory=dict)  # agent -> training rollouts spent
    updates: dict[str, int] = field(default_factory=dict)  # agent -> parameter updates made

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Add one step."""
        for name, agent in report.agents.items():
            self._add(name, agent.rollout.reward, agent.rollout.rollouts, agent.learning.updates)

    def on_evaluation(self, step: int, accuracies: Mapping[str, Accuracy]) -> None:
        """Keep one evaluation."""
        self.accuracies[step] = dict(accuracies)

    def _add(self, agent: str, reward: float, rollouts: int, updates: int) -> None:
        self.rewards.setdefault(agent, []).append(reward)
        self.rollouts[agent] = self.rollouts.get(agent, 0) + rollouts
        self.updates[agent] = self.updates.get(agent, 0) + updates


def read_result(folder: Path) -> RunResult:
    """The result of an earlier run, from its metrics and evaluations."""
    result = RunResult(folder)
    try:
        for line in (folder / "evaluations.jsonl").read_text("utf-8").splitlines():
            record = json.loads(line)
            result.accuracies[record["step"]] = {
                name: Accuracy(**values) for name, values in record["agents"].items()
            }
        for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines():
            for name, agent in json.loads(line)["agents"].items():
                result._add(
                    name,
                    agent["rollout"]["reward"],
                    agent["rollout"]["rollouts"],
                    agent["learning"]["updates"],
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} does not hold a readable run: {error!r}") from error
    return result
