"""Short real runs of tiny saved agents through ``run_locally``, and their results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from hacrl.config.schema import (
    AgentSettings,
    AnyMethodSettings,
    EvaluationSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
    TaskSettings,
)
from hacrl.runs.run import RunResult, run_locally
from hacrl.training.observer import Observer
from hacrl.types import VerifiedRollout
from tests.support.tiny import char_agent, pair_agent

GSPO = GspoSettings(clip_low=0.2, clip_high=0.28)
# random agents are far from each other: bounds so wide that others' rollouts do teach
HACPO = HacpoSettings(clip_low=0.2, clip_high=0.28, delta=0.9, delta_step=0.01, cross_upper=10.0)


@dataclass
class Watcher(Observer):
    """Records the phases and rollouts of a run."""

    phases: list[tuple[int, str, str]] = field(default_factory=list)
    rollouts: dict[tuple[int, str], list[VerifiedRollout]] = field(default_factory=dict)

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        self.phases.append((step, phase, agent))

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        self.rollouts[step, agent] = list(rollouts)


@dataclass
class Run:
    """One finished run."""

    result: RunResult
    watcher: Watcher

    @property
    def metrics_text(self) -> str:
        """metrics.jsonl, as written."""
        return (self.result.folder / "metrics.jsonl").read_text()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Per step: agent -> its metrics."""
        return [json.loads(line)["agents"] for line in self.metrics_text.splitlines()]

    def of(self, agent: str) -> list[dict[str, Any]]:
        """One agent's metrics, step by step."""
        return [step[agent] for step in self.steps]

    def weights(self, agent: str) -> dict[str, Tensor]:
        """As saved at the end."""
        return load_file(self.result.folder / "agents" / agent / "model.safetensors")


class Runs:
    """Starts runs on the same saved agents: "char", its "twin" with other weights, and "pair"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        for agent in (char_agent(), char_agent("twin", seed=1), pair_agent()):
            agent.save(folder / "start" / agent.name)

    def agent(self, name: str, **options) -> AgentSettings:
        return AgentSettings(name=name, model=str(self.folder / "start" / name), **options)

    def initial_weights(self, name: str) -> dict[str, Tensor]:
        return load_file(self.folder / "start" / name / "model.safetensors")

    def __call__(self, *agents: str | AgentSettings, **options) -> Run:
        watcher = Watcher()
        return Run(run_locally(self.config(*agents, **options), [watcher]), watcher)

    def config(
        self,
        *agents: str | AgentSettings,
        method: AnyMethodSettings = HACPO,
        steps: int = 3,
        seed: int = 0,
        learning: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        evaluation: dict[str, Any] | None = None,
        problems: int = 12,
    ) -> RunConfig:
        self.count += 1
        return RunConfig(
            agents=tuple(self.agent(a) if isinstance(a, str) else a for a in agents),
            output=str(self.folder / f"run{self.count}"),
            steps=steps,
            seed=seed,
            device="cpu",
            threads=1,
            task=TaskSettings(name="sevens", options={"problems": problems}),
            method=method,
            rollout=RolloutSettings(
                **{"prompts_per_step": 4, "rollouts_per_prompt": 4, "max_new_tokens": 4, **(rollout or {})}
            ),
            learning=LearningSettings(**{"lr": 5e-3, **(learning or {})}),
            evaluation=EvaluationSettings(**{"problems": 0, **(evaluation or {})}),
        )


def assert_same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert equality to the bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not one[name].equal(other[name])] == []


def assert_moved(one: dict[str, Tensor], other: dict[str, Tensor], least: float = 1e-3) -> None:
    """Assert that some weight differs by more than ``least``."""
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > least


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """A fresh set of agents, and a task on which random ones succeed now and then."""
    from hacrl.tasks.registry import TASKS
    from tests.support.sevens import SevensTask

    monkeypatch.setitem(TASKS, "sevens", SevensTask)
    return Runs(tmp_path)
