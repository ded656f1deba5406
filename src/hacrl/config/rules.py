"""Settings of the rules for sharing besides Naive and HACPO (``docs/methods.md``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hacrl.config.method_base import CrossRange, MethodSettings, SharingSettings, check_baseline_scale


@dataclass(frozen=True, kw_only=True)
class SuccessGatedSettings(SharingSettings):
    """Success-gated transfer of Mutual RL: partners' successes, where the agent's own responses all fail."""

    name: Literal["success_gated"] = "success_gated"
    """The method."""
    transfer_weight: float = 1.0
    """Weight of the log-likelihood of a partner's success, on the scale of an advantage."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if self.transfer_weight <= 0:
            raise ValueError(
                f"transfer_weight must be positive, not {self.transfer_weight}; agents that are to learn "
                "from themselves alone have name: gspo"
            )

    @property
    def title(self) -> str:
        """The method's name in headings."""
        return "Success-gated"

    def sources(self, agents: int) -> int:
        """Return 1: transferred successes join the updates on own responses."""
        return 1

    @property
    def needs_source_logprobs(self) -> bool:
        """Return False: a transferred success has no importance ratio."""
        return False


@dataclass(frozen=True, kw_only=True)
class XgrpoSettings(MethodSettings):
    """XGRPO of Mutual RL: own responses only, compared with the rewards of all agents."""

    name: Literal["xgrpo"] = "xgrpo"
    """The method."""

    @property
    def uses_other_agents(self) -> bool:
        """Return True: own responses are compared with the rewards of all agents."""
        return True


@dataclass(frozen=True, kw_only=True)
class FtisSettings(SharingSettings):
    """F-TIS: truncated importance sampling; distant responses with a negative advantage are filtered."""

    name: Literal["ftis"] = "ftis"
    """The method."""
    weight_cap: float = 2.0
    """C: importance weights of others' tokens are truncated to it."""
    filter_kl: float = 50.0
    """g: another agent's response with a negative advantage teaches nothing if its source finds it more
    likely by this many nats or more."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if self.weight_cap <= 0:
            raise ValueError(f"weight_cap must be positive, not {self.weight_cap}")
        if self.filter_kl < 0:
            raise ValueError(f"filter_kl must not be negative, not {self.filter_kl}")

    @property
    def title(self) -> str:
        """The method's name in headings."""
        return "F-TIS"


@dataclass(frozen=True, kw_only=True)
class SapoSettings(MethodSettings):
    """Pooling like SAPO: others' texts as if the agent had written them."""

    name: Literal["sapo"] = "sapo"
    """The method."""

    @property
    def shares_rollouts(self) -> bool:
        """Return True."""
        return True

    @property
    def rescores(self) -> bool:
        """Return True: the old policy of every response is the agent's own."""
        return True

    @property
    def cross_range(self) -> CrossRange | None:
        """The same interval as for own responses."""
        lower, upper = 1 - self.clip_low, 1 + self.clip_high
        return CrossRange(lower, upper, "method.clip_low", "method.clip_high")


@dataclass(frozen=True, kw_only=True)
class S2lpoSettings(SharingSettings):
    """S2L-PO: a small agent that does not learn explores for the others, at first alone, later not at all."""

    name: Literal["s2l_po"] = "s2l_po"
    """The method."""
    explorer: str | None = None
    """Name of the agent that explores and keeps its weights. Must be given."""
    anneal: float = 0.7
    """Share of the run's steps in which the explorer's share of each group falls from 1 to 0."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        if not 0 < self.anneal <= 1:
            raise ValueError(f"anneal must be in (0, 1], not {self.anneal}: it is a share of the run's steps")

    @property
    def title(self) -> str:
        """The method's name in headings."""
        return "S2L-PO"

    @property
    def cross_range(self) -> CrossRange | None:
        """The same interval as for own responses."""
        lower, upper = 1 - self.clip_low, 1 + self.clip_high
        return CrossRange(lower, upper, "method.clip_low", "method.clip_high")

    def sources(self, agents: int) -> int:
        """Return 1: the explorer's responses take the place of own ones."""
        return 1

    @property
    def frozen_agents(self) -> frozenset[str]:
        """Return the explorer's name."""
        return frozenset(() if self.explorer is None else (self.explorer,))

    def check_agents(self, agents: Sequence[str]) -> None:
        """Raise ValueError unless the explorer is one of several agents."""
        if self.explorer is None:
            raise ValueError(f"explorer: name the agent that explores for the others, of {', '.join(agents)}")
        if self.explorer not in agents:
            raise ValueError(f"explorer: there is no agent {self.explorer!r}, there are {', '.join(agents)}")
        if len(agents) < 2:
            raise ValueError(f"explorer: {self.explorer!r} is the only agent, and an explorer does not learn")


@dataclass(frozen=True, kw_only=True)
class AlignedSettings(SharingSettings):
    """Trust by measured gradient alignment: a partner counts while its gradient helps the agent's own."""

    name: Literal["aligned"] = "aligned"
    """The method."""
    trust_window: int = 5
    """Steps over which the cosine between a partner's gradient and the agent's own is averaged."""
    baseline_scale: float = 1.0
    """Factor of the mean reward in the baseline, as GSPO has it."""

    def __post_init__(self) -> None:
        MethodSettings.__post_init__(self)
        check_baseline_scale(self.baseline_scale)
        if self.trust_window < 2:
            raise ValueError(
                f"trust_window must be at least 2 steps, not {self.trust_window}: a single measurement says "
                "nothing about its own error"
            )
