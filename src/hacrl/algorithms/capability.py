"""Capability P_k and capability ratio omega(k, j) (eq. 8, 9)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hacrl.config.schema import CapabilityMeasure, CapabilitySettings


def batch_capability(
    rewards: Sequence[float], measure: CapabilityMeasure = "mean_reward", reward_min: float = 0.0
) -> float:
    """Return one agent's capability in one step.

    ``measure`` is the mean reward above ``reward_min``, or the share of positive rewards.
    """
    if not rewards:
        raise ValueError("an agent's capability needs at least one reward")
    if measure == "positive_share":
        return math.fsum(float(reward > 0) for reward in rewards) / len(rewards)
    return math.fsum(rewards) / len(rewards) - reward_min


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

    def __init__(self, agents: Sequence[str], settings: CapabilitySettings | None = None) -> None:
        self.settings = settings or CapabilitySettings()
        self._history: dict[str, deque[float]] = {
            agent: deque(maxlen=self.settings.window) for agent in agents
        }

    def record(self, rewards: Mapping[str, Sequence[float]], absent: Collection[str] = ()) -> None:
        """Add one step: each agent's rewards over the whole prompt batch. ``absent`` agents have none."""
        if rewards.keys() | set(absent) != self._history.keys():
            raise ValueError(
                f"rewards of {sorted(rewards)} given, capabilities of {sorted(self._history)} tracked"
            )
        capabilities = {
            agent: batch_capability(values, self.settings.measure, self.settings.reward_min)
            for agent, values in rewards.items()
        }
        for agent, capability in capabilities.items():  # only after all rewards have been checked
            self._history[agent].append(max(capability, self.settings.floor))

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
        return Capabilities(values, self.settings.ratio_min, self.settings.ratio_max)

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
            self._history[agent] = deque(values, maxlen=self.settings.window)
