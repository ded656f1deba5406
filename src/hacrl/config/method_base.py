"""What the settings of all methods share, and the points in which the paper and its public code differ.

``reading`` decides these points (``docs/paper_map.md``) all at once. A field that is left out (null) follows
it, and a field that is set decides its own point alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from hacrl.config.settings import Settings
from hacrl.types import RatioLength

Reading = Literal["paper", "public"]
CapabilityMeasure = Literal["mean_reward", "positive_share"]
CrossBaseline = Literal["source", "learner"]
MinibatchOrder = Literal["mixed", "self_first"]
Aggregation = Literal["response", "token", "constant"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The points in which the paper and its public code differ, each decided."""

    kl_coefficient: float
    capability_measure: CapabilityMeasure
    learn_stop_token: bool
    minibatch_order: MinibatchOrder
    ratio_length: RatioLength
    cross_baseline: CrossBaseline


READINGS: dict[Reading, Choices] = {
    "paper": Choices(
        kl_coefficient=0.0,
        capability_measure="mean_reward",
        learn_stop_token=True,
        minibatch_order="mixed",
        ratio_length="source",
        cross_baseline="source",
    ),
    "public": Choices(
        kl_coefficient=0.001,
        capability_measure="positive_share",
        learn_stop_token=False,
        minibatch_order="self_first",
        ratio_length="own",
        cross_baseline="learner",
    ),
}


class CrossRange(NamedTuple):
    """The interval of ratios in which another agent's responses teach, and the keys that set its ends."""

    lower: float  # in the first update of a step
    upper: float
    lower_key: str
    upper_key: str


@dataclass(frozen=True, kw_only=True)
class MethodSettings(Settings):
    """Settings that all methods share."""

    name: str
    """The method: `grpo`, `gspo`, `naive`, `hacpo`, an installed package's, or `module:attribute`."""
    reading: Reading = "paper"
    """Whose choices count where the paper and its public code differ: `paper`, or `public` for the newest
    version of the code. A key below whose default is "by `reading`" overrides one choice."""
    clip_low: float = 0.0003
    """Ratios of the agent's own responses are clipped to [1 - `clip_low`, 1 + `clip_high`]."""
    clip_high: float = 0.0004
    """Upper half of that interval."""
    kl_coefficient: float | None = None
    """Weight of the k3 penalty to the reference policy, on own responses only. By `reading`: 0 (paper), 0.001
    (public)."""
    capability_window: int = 5
    """K: an agent's capability is the mean over its last so many steps."""
    capability_measure: CapabilityMeasure | None = None
    """Capability of one step: `mean_reward`, or `positive_share`, the share of responses with a positive
    reward. By `reading`: `mean_reward` (paper), `positive_share` (public)."""
    reward_range: tuple[float, float | None] | None = None
    """Lowest and highest reward there can be. Capability counts from the lowest; HACPO's baseline does not
    exceed the highest. Default: 0 and the task's own highest reward, if the task knows one."""
    learn_stop_token: bool | None = None
    """Whether the stop token is part of the response that the loss sees. By `reading`: true (paper), false
    (public)."""
    minibatch_order: MinibatchOrder | None = None
    """`mixed`: a step's own and other responses are shuffled together; `self_first`: own responses come
    first. By `reading`: `mixed` (paper), `self_first` (public)."""

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1:
            raise ValueError(f"clip_low must be in [0, 1), not {self.clip_low}")
        if self.clip_high < 0:
            raise ValueError(f"clip_high must not be negative, not {self.clip_high}")
        if self.kl_coefficient is not None and self.kl_coefficient < 0:
            raise ValueError(f"kl_coefficient must not be negative, not {self.kl_coefficient}")
        if self.capability_window < 1:
            raise ValueError(f"capability_window must be at least 1 step, not {self.capability_window}")
        if self.max_reward is not None and self.max_reward <= self.min_reward:
            raise ValueError(f"reward_range must rise, not {[self.min_reward, self.max_reward]}")

    @property
    def shares_rollouts(self) -> bool:
        """Whether an agent learns from other agents' responses."""
        return False

    def sources(self, agents: int) -> int:
        """Return how many agents' responses an agent learns from, which sets its number of updates.

        ``agents``: the number of agents in the run.
        """
        return agents if self.shares_rollouts else 1

    @property
    def rescores(self) -> bool:
        """Whether ratios of other agents' responses are to the learner's own policy before the step."""
        return False

    @property
    def uses_other_agents(self) -> bool:
        """Whether anything about other agents' responses, if only their rewards, changes what is learnt."""
        return self.shares_rollouts

    @property
    def needs_source_logprobs(self) -> bool:
        """Whether another agent's response teaches only if its source's log-probabilities are known."""
        return self.shares_rollouts and not self.rescores

    @property
    def frozen_agents(self) -> frozenset[str]:
        """The names of agents that the method samples and does not train."""
        return frozenset()

    @property
    def trust_window(self) -> int | None:
        """Steps whose gradients decide which partners an agent trusts; None: the method asks for no trust."""
        return None

    @property
    def aggregation(self) -> Aggregation:
        """How the tokens of a mini-batch are weighed in its loss."""
        return "response"

    @property
    def baseline_scale(self) -> float:
        """Factor of the mean reward in the baseline, where the method has one to set."""
        return 1.0

    @property
    def cross_range(self) -> CrossRange | None:
        """Where ratios of other agents' responses are not clipped; None: no clipping, or not known."""
        return None

    @property
    def title(self) -> str:
        """The method's name in headings."""
        return self.name.upper()

    @property
    def choices(self) -> Choices:
        """The choices of `reading`, but for those that this record sets itself."""
        own: dict[str, Any] = {field.name: getattr(self, field.name, None) for field in fields(Choices)}
        return replace(READINGS[self.reading], **{key: own[key] for key in own if own[key] is not None})

    @property
    def min_reward(self) -> float:
        """The reward that counts as no capability."""
        return 0.0 if self.reward_range is None else self.reward_range[0]

    @property
    def max_reward(self) -> float | None:
        """The highest reward there can be; None: these settings do not say."""
        return None if self.reward_range is None else self.reward_range[1]

    def check_updates(self, updates_per_step: int) -> None:
        """Raise ValueError if the method cannot make so many updates in one step."""

    def check_agents(self, agents: Sequence[str]) -> None:
        """Raise ValueError if the method does not fit the run's agents."""


@dataclass(frozen=True, kw_only=True)
class SharingSettings(MethodSettings):
    """Settings of methods in which an agent learns from other agents' responses."""

    ratio_length: RatioLength | None = None
    """Length by which another tokenizer's response is normalised: `source`, the source's number of
    tokens, or `own`, each log-probability by its own number of tokens. By `reading`: `source` (paper),
    `own` (public)."""

    @property
    def shares_rollouts(self) -> bool:
        """Return True."""
        return True


def check_baseline_scale(scale: float) -> None:
    """Raise ValueError for a factor of the baseline that has no meaning."""
    if not 0 <= scale <= 1:
        raise ValueError(f"baseline_scale must be in [0, 1], not {scale}")
