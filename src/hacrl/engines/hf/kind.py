"""``engine: transformers``: the learner's own model generates, or copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hacrl.config.schema import AgentSettings, Precision
from hacrl.engines.base import Engine
from hacrl.engines.hf.detached import DetachedEngine
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.hf.gathered import GatheredEngine
from hacrl.engines.kinds import EngineKind, EngineSpec
from hacrl.engines.replicas.engine import ReplicaEngine
from hacrl.engines.replicas.fleet import FleetSettings
from hacrl.engines.replicas.placement import LocalPlacement
from hacrl.models.device import rank_devices
from hacrl.models.footprint import Footprint
from hacrl.models.sharding import sharding_of


class TransformersKind(EngineKind):
    """Decodes with the learner's weights; needs memory for the KV cache only."""

    shares_weights = True

    def variant(self, settings: AgentSettings) -> EngineKind:
        """Return the kind with weights of its own if the agent has copies of its model."""
        return ReplicaKind() if settings.replicas.count else self

    def make(self, spec: EngineSpec) -> Engine:
        """Return an engine that samples with the agent's model, or with a whole copy of a sharded one.

        Raise ModelError if the model cannot generate; of a sharded one that shows before its first response.
        """
        rollout = spec.rollout
        if sharding_of(spec.agent.model) is not None:
            return GatheredEngine(spec.agent, spec.probes, rollout.max_batch, compiles=spec.compiles)
        engine = TransformersEngine(spec.agent, rollout.max_batch, compiles=spec.compiles)
        engine.check_generation()
        return engine


class ReplicaKind(EngineKind):
    """Decodes with copies of the learner's model, while the learner may train."""

    samples_beside_learning = True

    def make(self, spec: EngineSpec) -> Engine:
        """Return an engine whose copies of the model are made at its first use.

        One copy lives in this process, several in processes of their own.
        """
        devices = replica_devices(spec.settings, spec.agent.device)
        if len(devices) > 1 or spec.placement is not None:
            return self._replicas(spec, devices)
        (device,) = devices
        return DetachedEngine(
            spec.agent,
            spec.probes,
            device,
            spec.rollout.max_batch,
            compiles=spec.compiles,
            timeout=spec.settings.replicas.timeout,
        )

    def _replicas(self, spec: EngineSpec, devices: Sequence[torch.device]) -> Engine:
        agent, timeout = spec.agent, spec.settings.replicas.timeout
        precision: Precision = "bfloat16" if agent.model.dtype == torch.bfloat16 else "float32"
        fleet = FleetSettings(
            agent=replace(spec.settings, precision=precision),
            stop_ids=tuple(sorted(agent.stop_ids)),
            context_length=agent.context_length,
            learner=agent.device,
            devices=tuple(devices),
            max_batch=spec.rollout.max_batch,
            compiles=spec.compiles,
            timeout=timeout,
        )
        return ReplicaEngine(agent, spec.probes, fleet, spec.placement or LocalPlacement(spec.folder))

    def memory(
        self, footprint: Footprint, settings: AgentSettings, device: torch.device, available: int
    ) -> int:
        """Return the bytes that the copies on the agent's device take: weights, KV cache, decoding."""
        here = replica_devices(settings, device).count(torch.device(*rank_devices(str(device), 1)))
        return here * (footprint.weights + footprint.cache + footprint.decoding)


def replica_devices(settings: AgentSettings, agent: torch.device) -> list[torch.device]:
    """Return the device of each copy of an agent's model; ``agent``: where the agent learns."""
    replicas = settings.replicas
    named = replicas.devices or (str(agent),) * replicas.count
    return [torch.device(*rank_devices(device, 1)) for device in named]  # cuda is cuda:0
