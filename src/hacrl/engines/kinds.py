"""What hacrl has to know of a kind of engine before one is made: is it usable, what memory does it need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hacrl.config.schema import AgentSettings, RolloutSettings
from hacrl.engines.base import Engine
from hacrl.engines.replicas.placement import ReplicaPlacement
from hacrl.models.agent import Agent
from hacrl.models.footprint import Footprint


@dataclass(frozen=True)
class EngineSpec:
    """What one agent's engine is made from."""

    agent: Agent
    settings: AgentSettings
    rollout: RolloutSettings
    probes: Sequence[tuple[int, ...]]  # prompts with which a weight update can be proven
    max_length: int  # tokens of the longest prompt with a full response
    folder: Path  # for logs and files that the engine starts from
    compiles: bool | None  # whether torch compiles the model's layers; None: if it is worth it
    seed: int  # of this run and agent: equal agents must not draw equal responses
    placement: ReplicaPlacement | None = None  # where the processes of replicas run; None: on this machine


class EngineKind(ABC):
    """One way to generate responses. Subclasses need :meth:`make`; the defaults fit a remote engine."""

    shares_weights = False  # whether engines compute with the learner's own tensors
    # Whether engines keep to the weights of the last sync while the learner trains: ``Engine.follows_policy``
    # is honoured. Asynchronous runs need that.
    samples_beside_learning = False
    takes_gpu_share = False  # whether ``vllm.memory`` and ``vllm.sleep`` say how engines share a GPU

    def variant(self, settings: AgentSettings) -> EngineKind:
        """Return the kind of engine that an agent with these settings has: this one, or a special case."""
        return self

    @abstractmethod
    def make(self, spec: EngineSpec) -> Engine:
        """Return an agent's engine; one with a process of its own starts at its first use."""

    def check(self, settings: AgentSettings) -> None:  # noqa: B027 - optional
        """Raise ConfigError, before models load, if the engine cannot be used as the settings ask."""

    def check_together(self, agents: Sequence[AgentSettings]) -> None:  # noqa: B027 - optional
        """Raise ConfigError if the engines of these agents, all of this kind, cannot be used side by side."""

    def notes(self, agents: Sequence[AgentSettings], devices: dict[str, torch.device]) -> tuple[str, ...]:
        """Return what the user should know of the engines of these agents, all of this kind."""
        return ()

    def sequences_at_once(self, settings: AgentSettings, rollout: RolloutSettings) -> int:
        """Return how many responses are decoded side by side at most."""
        return rollout.max_batch

    def longest_sequence(self, settings: AgentSettings) -> int:
        """Return the tokens of one sequence that memory is kept for in any case; 0: what a step needs."""
        return 0

    def memory(
        self, footprint: Footprint, settings: AgentSettings, device: torch.device, available: int
    ) -> int:
        """Return the bytes of the agent's device that its engine takes.

        ``footprint`` is what the agent would take if it decoded as many responses itself.
        """
        return 0

    def gives_memory_back(self, settings: AgentSettings, device: torch.device) -> bool:
        """Return whether the engine frees its memory while agents learn."""
        return False
