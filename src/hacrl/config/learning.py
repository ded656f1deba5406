"""Settings of learning: optimizer, number of updates, micro-batches, offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hacrl.config.settings import Settings

OldPolicy = Literal["auto", "sampler", "learner"]
Schedule = Literal["constant", "linear", "cosine"]
OffloadLevel = Literal["never", "optimizer", "stream", "weights", "all"]  # each offloads more
Offload = Literal["auto", OffloadLevel]
SkipZeroGradient = Literal["auto", "always", "never"]
WEIGHTS_LEAVE: tuple[OffloadLevel, ...] = ("weights", "all")  # levels that offload weights of idle agents
STREAMING: tuple[OffloadLevel, ...] = (
    "stream",
    *WEIGHTS_LEAVE,
)  # levels that load optimizers for updates only
FEW_TOKENS, MANY_TOKENS = 4096, 32768  # bounds of a micro-batch whose size is chosen by hacrl


@dataclass(frozen=True, kw_only=True)
class LearningSettings(Settings):
    """Optimizer and mini-batches. Rollouts, updates and learning rate are set independently."""

    lr: float = 1e-6
    """Learning rate of AdamW."""
    schedule: Schedule = "constant"
    """How the learning rate of every agent falls after the warm-up, from step to step until the run's last
    one: `constant`, `linear` or `cosine`."""
    warmup: float = 0
    """Steps in which the learning rate rises to its full value; below 1: share of the run's steps."""
    lr_floor: float = 0.0
    """Share of the learning rate that `linear` and `cosine` fall to."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""
    updates_per_source: int = 2
    """Updates of a learner in a step, for each agent it learns from and each pass over the samples."""
    updates_per_step: int | None = None
    """Updates of a learner in a step. Default: `updates_per_source` x sources x `epochs`."""
    epochs: int = 1
    """Passes over a step's samples."""
    max_cross_rollouts: int | None = None
    """Most responses of other agents per prompt that a learner trains on, those with the largest advantages
    first. Default: all."""
    mask_truncated: bool = False
    """Whether learners skip responses, own and others', that `rollout.max_new_tokens` cut. Their rewards stay
    in baselines and capabilities."""
    overlong_buffer: int = 0
    """Tokens before `rollout.max_new_tokens` in which a response loses reward, evenly up to 1 at the limit
    (DAPO's soft overlong punishment). Advantages alone see the loss. 0: off."""
    micro_batch_tokens: int | None = None
    """Most tokens in one forward pass; halved when memory runs out. Changes memory and speed, not the result.
    Default: 4096 or, on a GPU, as many as keep it busy and fit, at most 32768."""
    skip_zero_gradient: SkipZeroGradient = "auto"
    """Whether a forward pass finds the responses without a gradient (clipped ones), so that only the others
    get a backward pass. `auto`: where it saves work, by the clipped share of earlier updates. The result is
    the same up to rounding."""
    measure_alignment: bool = True
    """Whether metrics say how well the gradients of own and of others' responses agree
    (`learning/gradient_alignment`). In one update of a step, the two are then computed in separate passes."""
    compile: bool | None = None
    """Whether torch compiles decoder layers, for learning and for the transformers engine. Default: on a GPU,
    for models of at least 100 million parameters with 16-bit weights whose sequences can be packed."""
    old_policy: OldPolicy = "auto"
    """Whose log-probabilities of own responses are the old policy's: the `sampler`'s, or the `learner`'s
    before the step's first update. `auto`: the learner's where the engine's numerics differ from its own."""
    mismatch_cap: float = 2.0
    """C: with the learner's old policy, own responses are weighted by its ratio to the sampler, at most C."""
    offload: Offload = "auto"
    """What agents on a GPU move to the machine's memory while they do not need it. `never`: nothing;
    `optimizer`: master weights and moments of agents that do not learn; `stream`: these always, except for
    the update itself; `weights`: also weights of idle agents; `all`: also gradient sums. `auto`: as little as
    fits. The result does not change."""

    def __post_init__(self) -> None:
        for key in ("updates_per_source", "epochs"):
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
        if self.overlong_buffer < 0:
            raise ValueError(f"overlong_buffer must not be negative, not {self.overlong_buffer} (0: off)")
        if self.max_cross_rollouts is not None and self.max_cross_rollouts < 1:
            raise ValueError(
                f"max_cross_rollouts must be at least 1, not {self.max_cross_rollouts}; null means all, and "
                "agents that are to learn from themselves alone have method.name: gspo"
            )
        for key in ("lr", "max_grad_norm"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive, not {getattr(self, key)}")
        self._check_schedule()
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas must be in [0, 1), not {beta}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, not {self.weight_decay}")
        if not self.mismatch_cap >= 1:
            raise ValueError(
                f"mismatch_cap must be at least 1, not {self.mismatch_cap}: a sampler that agrees with the "
                "learner has weight 1"
            )

    def _check_schedule(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, not {self.warmup}")
        if self.warmup > 1 and self.warmup != int(self.warmup):
            raise ValueError(
                f"warmup must be a whole number of steps, or a share of the run below 1, not {self.warmup}"
            )
        if not 0 <= self.lr_floor <= 1:
            raise ValueError(f"lr_floor must be in [0, 1], not {self.lr_floor}: it is a share of lr")
        if self.lr_floor and self.schedule == "constant":
            raise ValueError(
                f"lr_floor must be 0, not {self.lr_floor}, with the schedule 'constant'; set schedule to "
                "'linear' or 'cosine'"
            )

    def recomputes_old_policy(self, exact_sampler: bool) -> bool:
        """Whether the old policy is the learner's; ``exact_sampler``: the sampler's numbers are equal."""
        if self.old_policy == "auto":
            return not exact_sampler
        return self.old_policy == "learner"

    def updates(self, sources: int) -> int:
        """Return the number of updates that a learner with so many sources makes in a step."""
        if self.updates_per_step is not None:
            return self.updates_per_step
        return self.updates_per_source * sources * self.epochs
