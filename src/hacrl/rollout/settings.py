"""What is asked in a step, and how answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.agents.engine_settings import EngineName
from hacrl.types import Sampling


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """One step asks every agent the same prompts; each answers every prompt several times."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    prompts_per_step: int = 16
    rollouts_per_prompt: int = 8  # G; an agent may have its own
    max_prompt_tokens: int | None = None  # longer ones are left out; None: one that does not fit is an error
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    engine: EngineName = "transformers"  # what generates responses; an agent may have its own
    max_batch: int = 512  # most responses of an agent that transformers decodes side by side
    compile: bool | None = None  # transformers' layers compiled; None: as learning.compile's

    def __post_init__(self) -> None:
        for key in ("prompts_per_step", "rollouts_per_prompt", "max_new_tokens", "max_batch"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, not {self.max_prompt_tokens}")
        if not self.temperature >= 0.01:
            raise ValueError(
                f"temperature must be at least 0.01, not {self.temperature}: learning needs sampling"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must not be negative, not {self.top_k} (0 means no limit)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")

    @property
    def sampling(self) -> Sampling:
        """The sampling distribution of training rollouts."""
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p)
