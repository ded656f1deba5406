"""Learning-rate warm-up and schedules, as a function of the step's number alone.

All updates of one step have the same learning rate. The factor on every agent's learning rate is

    t / W                                  in the warm-up, t = 1 ... W
    f + (1 - f) * decay((t - 1 - W) / (T - W))      afterwards, t = W + 1 ... T

with ``decay(x)`` = 1 (constant), 1 - x (linear) or (1 + cos(pi x)) / 2 (cosine), T steps in the run, W of
them warm-up, and the floor f. The first step has the rate 1/W and not 0, and the last one is above the floor:
no step's rollouts are sampled for updates of size 0. transformers counts its optimizer steps from 0, so its
factors are those of t in the warm-up and of t - 1 afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hacrl.config.schema import RunConfig, Schedule

ROUNDING = 1e-9  # of a share times a number of steps: 0.07 * 100 is not 7 in floating point


@dataclass(frozen=True)
class LearningRateSchedule:
    """The factor on the learning rates in every step of a run."""

    kind: Schedule = "constant"
    warmup: float = 0.0  # steps, or a share of the run's steps if below 1
    floor: float = 0.0  # share of the learning rate that the decay ends at
    steps: int = 1  # of the run

    @classmethod
    def of(cls, config: RunConfig) -> LearningRateSchedule:
        """Return the schedule of a run."""
        learning = config.learning
        return cls(learning.schedule, learning.warmup, learning.lr_floor, config.steps)

    @property
    def warmup_steps(self) -> int:
        """W, the number of warm-up steps; a share is rounded up."""
        if self.warmup >= 1:
            return int(self.warmup)
        return math.ceil(self.warmup * self.steps - ROUNDING)

    def factor(self, step: int) -> float:
        """Return the factor in a step, counted from 1."""
        warmup = self.warmup_steps
        if step <= warmup:
            return step / warmup
        done = (step - 1 - warmup) / max(1, self.steps - warmup)
        return self.floor + (1.0 - self.floor) * self._decay(min(done, 1.0))

    def _decay(self, done: float) -> float:
        if self.kind == "linear":
            return 1.0 - done
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about a warm-up that the run does not outlast."""
        warmup = self.warmup_steps
        if self.steps == 0 or warmup <= self.steps:
            return []
        reached = self.factor(self.steps)
        return [
            f"learning.warmup is {warmup} steps, but the run has {self.steps}: the learning rate reaches "
            f"{reached:.0%} of learning.lr. Lower learning.warmup, or give a share of the run, e.g. 0.1"
        ]
