"""How an agent turns its samples of one step into parameter updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MinibatchOrder = Literal["mixed", "self_first"]


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """Optimizer and mini-batches. Rollouts, updates and learning rate are set independently."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_source: int = 2  # a learner with n sources makes n times as many updates a step ...
    updates_per_step: int | None = None  # ... unless the number is given
    epochs: int = 1  # passes over the step's samples; multiplies the updates unless their number is given
    minibatch_order: MinibatchOrder = "mixed"
    learn_stop_token: bool = True
    micro_batch_tokens: int = 4096  # most padded tokens in one forward pass

    def __post_init__(self) -> None:
        for key in ("updates_per_source", "epochs", "micro_batch_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.updates_per_step is not None and self.updates_per_step < self.epochs:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} must be at least epochs={self.epochs}: "
                "every pass over the samples makes an update"
            )
        for key in ("lr", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} must be in [0, 1), not {getattr(self, key)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")

    def updates(self, sources: int) -> int:
        """Parameter updates one learner makes in a step."""
        if self.updates_per_step is not None:
            return self.updates_per_step
        return self.updates_per_source * sources * self.epochs
