"""Capability P_k and capability ratio omega(k, j) (eq. 8, 9)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hacrl.config.schema import CapabilityMeasure, MethodSettings

# Of the public code; the paper does not say.
FLOOR = 1e-8  # a step's capability is never below this, so that ratios exist
RATIO_MIN, RATIO_MAX = 0.1, 10.0  # omega is clamped to this interval


def batch_capability(
    rewards: Sequence[float], measure: CapabilityMeasure = "mean_reward", min_reward: float = 0.0
) -> float:
    """Return one agent's capability in one step.

    ``measure`` is the mean reward above ``min_reward``, or the share of positive rewards.
    """
    if not rewards:
        raise ValueError("an agent's capability needs at least one reward")
    if measure == "positive_share":
        return math.fsum(float(reward > 0) for reward in rewards) / len(rewards)
    return math.fsum(rewards) / len(rewards) - min_reward


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of all agents after one step, as plain numbers."""

    values: Mapping[str, float]  # P_k by agent
    ratio_min: float
    ratio_max: float

    def ratio(self, numerator: str, denominator: str) -> float:
        """Return omega(k, j) = P_k / P_j (eq. 9), clamped to [ratio_min, ratio_max]."""
        ratio = self.values[numerator] / self.values[denominator]
        return min(max(ratio, self.ratio_min), self.ratio_max)


class CapabilityTracker:
    """Track each agent's capability P_k, the mean over the last K steps (eq. 8), and ratios (eq. 9)."""

    def __init__(
        self,
        agents: Sequence[str],
        *,
        window: int = 5,
        measure: CapabilityMeasure = "mean_reward",
        min_reward: float = 0.0,
        floor: float = FLOOR,
        ratio_min: float = RATIO_MIN,
        ratio_max: float = RATIO_MAX,
    ) -> None:
        if window < 1:
            raise ValueError(f"window must be at least 1 step, not {window}")
        if floor <= 0:
            raise ValueError(f"floor must be positive, not {floor}: a ratio divides by it")
        if not 0 < ratio_min <= 1 <= ratio_max:
            raise ValueError(
                f"ratio_min={ratio_min} and ratio_max={ratio_max} must enclose 1 and be positive"
            )
        self._window, self._measure, self._min_reward = window, measure, min_reward
        self._floor, self._ratio_min, self._ratio_max = floor, ratio_min, ratio_max
        self._history: dict[str, deque[float]] = {agent: deque(maxlen=window) for agent in agents}

    @classmethod
    def of(cls, agents: Sequence[str], settings: MethodSettings) -> CapabilityTracker:
        """Return the tracker that a method's settings describe."""
        return cls(
            agents,
            window=settings.capability_window,
            measure=settings.choices.capability_measure,
            min_reward=settings.min_reward,
        )

    def record(self, rewards: Mapping[str, Sequence[float]], absent: Collection[str] = ()) -> None:
        """Add one step: each agent's rewards over the whole prompt batch. ``absent`` agents have none."""
        if rewards.keys() | set(absent) != self._history.keys():
            raise ValueError(
                f"rewards of {sorted(rewards)} given, capabilities of {sorted(self._history)} tracked"
            )
        capabilities = {
            agent: batch_capability(values, self._measure, self._min_reward)
            for agent, values in rewards.items()
        }
        for agent, capability in capabilities.items():  # only after all rewards have been checked
            self._history[agent].append(max(capability, self._floor))

    def capability(self, agent: str) -> float:
        """Return P_k (eq. 8); 1 for every agent before the first step."""
        history = self._history[agent]
        return math.fsum(history) / len(history) if history else 1.0

    def ratio(self, numerator: str, denominator: str) -> float:
        """Return omega(k, j) of :attr:`current`."""
        return self.current.ratio(numerator, denominator)

    @property
    def current(self) -> Capabilities:
        """The capabilities now, as a record that does not change."""
        values = {agent: self.capability(agent) for agent in self._history}
        return Capabilities(values, self._ratio_min, self._ratio_max)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the last K steps' capabilities as lists that JSON can hold, for exact resume."""
        return {agent: list(history) for agent, history in self._history.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        if state.keys() != self._history.keys():
            raise ValueError(
                f"the saved capabilities are of {sorted(state)}, this run has {sorted(self._history)}"
            )
        for agent, values in state.items():
            self._history[agent] = deque(values, maxlen=self._window)
