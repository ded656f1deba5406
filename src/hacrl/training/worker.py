"""One agent and how it takes part in training; what all are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hacrl.engines.base import RolloutEngine
from hacrl.models.agent import Agent
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import Problem, Sampling


@dataclass(frozen=True)
class Participant:
    """One agent and how it takes part: how it answers, sees others' answers, and learns."""

    agent: Agent
    engine: RolloutEngine
    builder: SampleBuilder
    learner: Learner
    rollouts_per_prompt: int

    @property
    def name(self) -> str:
        """The agent's name."""
        return self.agent.name


@dataclass(frozen=True)
class Questions:
    """What agents are asked, all the same. How often, and with which draws, is each one's own."""

    phase: Literal["rollout", "evaluate"]  # what for
    problems: Sequence[Problem]
    sampling: Sampling
    samples: Callable[[Participant], int]  # responses to each problem
    seed: Callable[[Participant], int]
