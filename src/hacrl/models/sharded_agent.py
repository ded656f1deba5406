"""An agent whose model is sharded over ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from hacrl.config.schema import AgentSettings
from hacrl.models.agent import Agent
from hacrl.models.device import current_device
from hacrl.models.loading import load_model, load_model_config, load_tokenizer, make_skeleton, torch_precision
from hacrl.models.rank_group import RankGroup
from hacrl.models.sharding import copy_weights, shard_model, sharding_of, whole_model


class ShardedAgent(Agent):
    """One rank of an agent. All ranks make the same calls, or rank 0 announces them to the others."""

    @classmethod
    def load_shards(
        cls, settings: AgentSettings, device: str, group: RankGroup, seed: int = 0
    ) -> ShardedAgent:
        """Load the agent on rank 0 into the machine's memory, and give every rank its shards."""
        tokenizer = load_tokenizer(settings)
        source = None
        with group.together():
            if group.rank == 0:
                source = load_model(settings, tokenizer, device, seed, location="cpu")
        with current_device(torch.device(device)):
            model = shard_model(
                partial(make_skeleton, settings, device, seed),
                group,
                torch.device(device),
                torch_precision(settings, load_model_config(settings), device),
                source,
                cpu_offload=settings.fsdp.cpu_offload,
            )
        if source is not None:
            model.generation_config = source.generation_config
        return cls(settings.name, model, tokenizer, settings.chat_template, settings.chat_template_args)

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder. Rank 0 holds the whole model in the machine's memory for it."""
        sharding = sharding_of(self.model)
        is_writer = sharding is not None and sharding.group.rank == 0
        whole = whole_model(self.model, torch.device("cpu")) if is_writer else None
        copy_weights(self.model, whole)
        if whole is not None:
            Agent(self.name, whole, self.tokenizer).save(folder)
