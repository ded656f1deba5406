"""One agent and how it takes part in training."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.agents.agent import Agent
from hacrl.learning.learner import Learner
from hacrl.learning.samples import SampleBuilder
from hacrl.rollout.engine import RolloutEngine


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
