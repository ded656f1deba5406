"""The options of every method, as plain frozen records with the paper's defaults.

The config layer validates user input straight into these, so an option exists in exactly one place.
Where the paper and its public code differ, the default follows the paper: see ``docs/paper_map.md``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hacrl.algorithms.advantage import NormaliserSettings
from hacrl.algorithms.capability import CapabilitySettings
from hacrl.algorithms.clipping import check_schedule
from hacrl.types import RatioLength


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """What all methods have in common."""

    shares_rollouts: ClassVar[bool] = False  # whether learners see other agents' responses
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    clip_low: float = 0.0003  # own responses are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.0004
    kl_coefficient: float = 0.0  # k3 penalty to the reference policy, own responses only
    std: NormaliserSettings = field(default_factory=NormaliserSettings)
    capability: CapabilitySettings = field(default_factory=CapabilitySettings)

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be in [0, 1), not {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must not be negative, not {self.clip_high}")
        if self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must not be negative, not {self.kl_coefficient}")

    def check_updates(self, updates_per_step: int) -> None:
        """Raise ValueError if the method cannot make so many updates in one step."""


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(MethodSettings):
    """GRPO, each agent alone: token-level ratio."""

    name: Literal["grpo"] = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.28


@dataclass(frozen=True, kw_only=True)
class GspoSettings(MethodSettings):
    """GSPO, each agent alone: sequence-level ratio."""

    name: Literal["gspo"] = "gspo"


@dataclass(frozen=True, kw_only=True)
class NaiveSettings(MethodSettings):
    """Shared rollouts without the four mechanisms: joint mean and std, plain GSPO ratio and clip."""

    shares_rollouts: ClassVar[bool] = True
    name: Literal["naive"] = "naive"
    ratio_length: RatioLength = "source"


@dataclass(frozen=True, kw_only=True)
class HacpoSettings(MethodSettings):
    """HACPO: the four mechanisms, each with its switch."""

    shares_rollouts: ClassVar[bool] = True
    name: Literal["hacpo"] = "hacpo"
    ratio_length: RatioLength = "source"
    # mechanism 1: capability-aware advantage
    capability_baseline: bool = True  # False: omega = 1 in mu_k (ablation)
    cross_baseline: Literal["source", "learner"] = "source"  # whose mu a cross response is compared with
    baseline_overshoot: Literal["own_mean", "keep"] = "own_mean"  # what to do when mu_k > max_reward
    max_reward: float | None = None  # the largest possible reward; None: the task's, if it says so
    # mechanism 2: capability discrepancy coefficient
    discrepancy: bool = True  # False: cross advantages are not scaled (ablation)
    # mechanism 3: exponential importance sampling
    alpha: float = 1.0  # 0 switches it off
    exponent_on: Literal["clipped", "raw"] = "clipped"
    # mechanism 4: stepwise clipping
    cross_clip: bool = True  # False: cross ratios are not clipped (ablation)
    delta: float = 0.2
    delta_step: float = 0.025  # 0 switches the schedule off
    cross_upper: float = 1.0

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if self.alpha < 0:
            raise ValueError(f"alpha must not be negative, not {self.alpha}")
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must be in (0, 1), not {self.delta}: the lower bound is 1 - delta "
                "(the paper's table 5 lists the bound itself; its 0.8 is delta: 0.2)"
            )
        if self.delta_step < 0:
            raise ValueError(f"delta_step must not be negative, not {self.delta_step}")
        if self.cross_upper < 1:
            raise ValueError(f"cross_upper must be at least 1, not {self.cross_upper}")

    def check_updates(self, updates_per_step: int) -> None:
        """The stepwise clip interval must not close before the last update."""
        if self.cross_clip:
            check_schedule(self.delta, self.delta_step, self.cross_upper, updates_per_step)


AnyMethodSettings = GrpoSettings | GspoSettings | NaiveSettings | HacpoSettings
