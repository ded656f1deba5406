"""One agent: a model, its tokenizer, and how many updates it has made. It knows no other agent."""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from hacrl.agents.loading import load_model_and_tokenizer
from hacrl.agents.settings import AgentSettings
from hacrl.errors import TaskError
from hacrl.types import Problem

PROMPTS_REMEMBERED = 65536  # every step asks for the same prompt's ids several times


class Agent:
    """A policy that can be asked, taught and saved."""

    def __init__(self, name: str, model: Any, tokenizer: Any, use_chat_template: bool = True) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.use_chat_template = use_chat_template and tokenizer.chat_template is not None
        self.policy_version = 0
        self._prompt_ids = lru_cache(maxsize=PROMPTS_REMEMBERED)(self._encode_prompt_text)

    @classmethod
    def load(cls, settings: AgentSettings, device: str) -> Agent:
        """Load the model a user asked for and put it on a device."""
        model, tokenizer = load_model_and_tokenizer(settings)
        return cls(settings.name, model.to(device), tokenizer, settings.chat_template)

    @property
    def device(self) -> torch.device:
        """Where the agent's weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def context_length(self) -> int | None:
        """Most tokens the model can attend to, if its config says so."""
        length: int | None = getattr(self.model.config, "max_position_embeddings", None)
        return length

    @property
    def num_parameters(self) -> int:
        """Parameters, shared ones counted once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a response: the tokenizer's, and those of the model's generation config."""
        configured = self.model.generation_config.eos_token_id
        extra = configured if isinstance(configured, list) else [configured]
        return frozenset(int(token) for token in (self.tokenizer.eos_token_id, *extra) if token is not None)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: a response that merely spells one out cannot be represented."""
        return self.stop_ids | frozenset(self.tokenizer.all_special_ids)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        """Equal for two agents exactly if the same text has the same ids, prompts and stop token included."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else sorted(self.tokenizer.get_vocab().items())
        template = self.tokenizer.chat_template if self.use_chat_template else None
        identity = repr((vocabulary, self.tokenizer.eos_token_id, sorted(self.stop_ids), template))
        return hashlib.sha256(identity.encode()).hexdigest()

    def encode_prompt(self, problem: Problem) -> tuple[int, ...]:
        """The agent's own way of being asked: its chat template if it has one, else the plain prompt."""
        ids = self._prompt_ids(problem.prompt)
        if not ids:
            raise TaskError(f"problem {problem.id!r} is an empty prompt for agent {self.name!r}")
        return ids

    def _encode_prompt_text(self, prompt: str) -> tuple[int, ...]:
        if not self.use_chat_template:
            return tuple(self.tokenizer(prompt).input_ids)
        message = [{"role": "user", "content": prompt}]
        text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def encode_response(self, text: str, stopped: bool) -> tuple[int, ...]:
        """Somebody's response in this agent's tokens, with its own stop token if the source stopped."""
        ids = tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        return (*ids, int(self.tokenizer.eos_token_id)) if stopped else ids

    def decode(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Text of response tokens, exactly as the tokens spell it."""
        text: str = self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def save(self, folder: Path) -> None:
        """Write a plain Hugging Face folder that loads anywhere, alone."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
