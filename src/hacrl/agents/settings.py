"""What a user says about one agent."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AgentSettings:
    """One agent: any causal language model with its tokenizer. ``None`` takes the run's general setting."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    name: str
    model: str  # "bundled:NAME", a folder, or a Hugging Face id
    rollouts_per_prompt: int | None = None
    lr: float | None = None
    device: str | None = None
    chat_template: bool = True  # use the tokenizer's chat template if it has one
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name {self.name!r} becomes a folder name: use letters, digits, '.', '_' and '-' only"
            )
        if self.rollouts_per_prompt is not None and self.rollouts_per_prompt < 1:
            raise ValueError(f"rollouts_per_prompt must be at least 1, not {self.rollouts_per_prompt}")
        if self.lr is not None and self.lr <= 0:
            raise ValueError(f"lr must be positive, not {self.lr}")
