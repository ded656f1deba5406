"""An agent: a model, its tokenizer and chat template, and the number of updates it has made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hacrl.config.schema import AgentSettings
from hacrl.models.loading import load_model, load_tokenizer
from hacrl.models.lora import is_adapted, save_merged
from hacrl.models.tokenizing import TextCodec, context_length


class Agent(TextCodec):
    """A policy that can generate, be trained and be saved. An agent knows no other agent."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        use_chat_template: bool = True,
        chat_template_args: Mapping[str, Any] | None = None,
    ) -> None:
        length = context_length(model.config)
        super().__init__(
            name, tokenizer, model.generation_config, length, use_chat_template, chat_template_args
        )
        self.model = model
        self.policy_version = 0

    @classmethod
    def load(cls, settings: AgentSettings, device: str, seed: int = 0) -> Agent:
        """Load the agent's model onto a device. ``seed`` initialises new adapter weights."""
        tokenizer = load_tokenizer(settings)
        model = load_model(settings, tokenizer, device, seed)
        return cls(settings.name, model, tokenizer, settings.chat_template, settings.chat_template_args)

    @property
    def device(self) -> torch.device:
        """The device of the agent's weights."""
        device: torch.device = self.model.device
        return device

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder that transformers loads without hacrl; adapters are merged."""
        if is_adapted(self.model):
            save_merged(self.model, folder)
        else:
            self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
