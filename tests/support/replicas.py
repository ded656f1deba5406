"""Engines with real replica processes, for agents whose model is in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.replicas.engine import ReplicaEngine
from hacrl.engines.replicas.fleet import FleetSettings
from hacrl.engines.replicas.placement import LocalPlacement
from hacrl.models.agent import Agent
from tests.support.engines import probe_prompts

CPU = torch.device("cpu")


def replica_engine(
    agent: Agent,
    folder: Path,
    count: int = 2,
    max_batch: int = 512,
    timeout: float = 60.0,
    lora: LoraSettings | None = None,
    probes: Sequence[tuple[int, ...]] | None = None,
) -> ReplicaEngine:
    """Return an engine whose replicas read the model's config and tokenizer from a folder, no weights."""
    base: Any = agent.model.get_base_model() if lora else agent.model
    base.config.save_pretrained(folder / "model")
    agent.tokenizer.save_pretrained(folder / "model")
    settings = FleetSettings(
        agent=AgentSettings(name=agent.name, model=str(folder / "model"), precision="float32", lora=lora),
        stop_ids=tuple(sorted(agent.stop_ids)),
        context_length=agent.context_length,
        learner=CPU,
        devices=(CPU,) * count,
        max_batch=max_batch,
        compiles=None,
        timeout=timeout,
    )
    prompts = probe_prompts(agent) if probes is None else probes
    return ReplicaEngine(agent, prompts, settings, LocalPlacement(folder))
