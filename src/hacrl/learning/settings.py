"""How an agent turns its samples of one step into parameter updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MinibatchOrder = Literal["mixed", "self_first"]
OldPolicy = Literal["auto", "sampler", "learner"]
OffloadLevel = Literal["never", "optimizer", "stream", "weights", "all"]  # each sends more away
Offload = Literal["auto", OffloadLevel]
WEIGHTS_LEAVE: tuple[OffloadLevel, ...] = ("weights", "all")  # those of agents not at work
STREAMING: tuple[OffloadLevel, ...] = ("stream", *WEIGHTS_LEAVE)  # optimizers are there for updates only
FEW_TOKENS, MANY_TOKENS = 4096, 32768  # of a micro-batch, if nobody has said how many


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
    # Most responses of others per prompt that a learner learns from, those that teach most first; None: all.
    max_cross_rollouts: int | None = None
    minibatch_order: MinibatchOrder = "mixed"
    learn_stop_token: bool = True
    # Most tokens in one forward pass, fewer once memory runs out. None: 4096 or, on a GPU, as many as keep it
    # busy and fit, up to 32768.
    micro_batch_tokens: int | None = None
    compile: bool | None = None  # layers compiled by torch; None: on a GPU, large models of 16 bits
    # Whose log-probabilities of own rollouts are pi_old: the sampler's, or the learner's before the step's
    # first update. "auto": the learner's where the rollout engine's numerics differ from its own.
    old_policy: OldPolicy = "auto"
    mismatch_cap: float = 2.0  # C: the learner's pi_old over the sampler's weighs own rollouts, up to this
    # What agents on a GPU send to the machine's memory while they do not need it: nothing; masters and
    # moments of those that do not learn; these always, but for the update itself; also the weights of those
    # not at work; or also sums of gradients. "auto": as little as fits. No number changes.
    offload: Offload = "auto"
    max_bad_updates: int = 5  # updates in a row with a loss or gradient that is not finite; then the run ends

    def __post_init__(self) -> None:
        for key in ("updates_per_source", "epochs", "max_bad_updates"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.micro_batch_tokens is not None and self.micro_batch_tokens < 1:
            raise ValueError(
                f"micro_batch_tokens must be at least 1, not {self.micro_batch_tokens}; null means as many "
                "as suit the device"
            )
        if self.updates_per_step is not None and self.updates_per_step < self.epochs:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} must be at least epochs={self.epochs}: "
                "every pass over the samples makes an update"
            )
        if self.max_cross_rollouts is not None and self.max_cross_rollouts < 1:
            raise ValueError(
                f"max_cross_rollouts must be at least 1, not {self.max_cross_rollouts}; null means all, and "
                "agents that are to learn from themselves alone have method.name: gspo"
            )
        for key in ("lr", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        for key in ("beta1", "beta2"):
            if not 0 <= getattr(self, key) < 1:
                raise ValueError(f"{key} must be in [0, 1), not {getattr(self, key)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not self.mismatch_cap >= 1:
            raise ValueError(
                f"mismatch_cap must be at least 1, not {self.mismatch_cap}: a sampler that agrees with the "
                "learner has weight 1"
            )

    def recomputes_old_policy(self, exact_sampler: bool) -> bool:
        """Whether pi_old is the learner's; ``exact_sampler``: sampler and learner give the same numbers."""
        if self.old_policy == "auto":
            return not exact_sampler
        return self.old_policy == "learner"

    def updates(self, sources: int) -> int:
        """Parameter updates one learner makes in a step."""
        if self.updates_per_step is not None:
            return self.updates_per_step
        return self.updates_per_source * sources * self.epochs
