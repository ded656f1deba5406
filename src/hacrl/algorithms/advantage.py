"""Agent-capability-aware advantage (eq. 6, 7) for the responses to one prompt.

    mu_k  = 1/n * sum_j mean_i omega(k, j) * R(y_i^j)        the reward that agent k is expected to earn
    A_i^k = (R(y_i^k) - mu_k) / sigma_joint                  sigma over the rewards of all responses

If all agents have the same number of responses G, 1/n * mean_i is the paper's 1/(nG). If they differ, every
agent still has the same weight. With one agent, omega is 1 and A is the group-relative advantage of GRPO and
GSPO. Sums are exact (``fsum``), so that the order of agents cannot change a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Largest relative error of a baseline by rounding, which causes about 1e-15. A baseline of 0/1 rewards that
# is not 1 differs by more than 1e-10, even with thousands of responses.
ROUNDING = 1e-12
NO_CAPABILITY = 1e-7  # above the floor of capabilities, 1e-8, and below any success in a thousand steps
PromptRewards = Mapping[str, Sequence[float]]  # agent -> rewards of its responses to one prompt
CapabilityRatio = Callable[[str, str], float]  # omega(k, j)
# source agent -> advantage of each of its responses to one prompt; None: the learner does not train on it
Advantages = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, kw_only=True)
class Normaliser:
    """How advantages are divided by the standard deviation: as in the public code; the paper does not say."""

    unbiased: bool = True  # divide by N - 1
    epsilon: float = 1e-6  # added to the standard deviation

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon must not be negative, not {self.epsilon}")


def equal_capability(_k: str, _j: str) -> float:
    """Return omega = 1 for every pair of agents: all agents count as equally capable."""
    return 1.0


def joint_std(rewards: PromptRewards, unbiased: bool = True) -> float:
    """Return sigma_joint, the standard deviation of all agents' rewards (eq. 7); 0 for a single response."""
    pooled = [reward for values in rewards.values() for reward in values]
    degrees = len(pooled) - 1 if unbiased else len(pooled)
    if degrees == 0:
        return 0.0
    mean = math.fsum(pooled) / len(pooled)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in pooled) / degrees)


def capability_aware_baseline(
    rewards: PromptRewards,
    agent: str,
    capability_ratio: CapabilityRatio,
    overshoot: Literal["own_mean", "keep"] = "own_mean",
    max_reward: float | None = 1.0,
) -> float:
    """Return mu_k (eq. 6).

    With overshoot="own_mean", replace a baseline above ``max_reward`` by the agent's own mean reward. A
    baseline that is above only by rounding is ``max_reward``.
    """
    means = {source: math.fsum(values) / len(values) for source, values in rewards.items()}
    expected = [capability_ratio(agent, source) * mean for source, mean in means.items()]
    baseline = math.fsum(expected) / len(means)
    if overshoot == "keep" or max_reward is None or baseline <= max_reward:
        return baseline
    magnitude = max(abs(max_reward), *map(abs, expected))
    return max_reward if baseline - max_reward <= ROUNDING * magnitude else means[agent]


def ratio_of_sums_baseline(
    rewards: PromptRewards, agent: str, capabilities: Mapping[str, float], min_reward: float = 0.0
) -> float:
    """Return mu_k = P_k * sum_j m_j / sum_j P_j, with m_j the mean reward of agent j's responses.

    Rewards count from ``min_reward``, as capabilities do. The baseline is eq. 6 where all capabilities are
    equal. Where every E[m_j] is proportional to P_j, it is unbiased like eq. 6, also with agents of
    capability 0: a ratio of capabilities never stands alone. Every agent weighs as much as it succeeds.
    """
    means = {source: math.fsum(values) / len(values) for source, values in rewards.items()}
    if len(means) == 1:
        return means[agent]  # exactly GSPO's
    total = math.fsum(capabilities[source] for source in means)
    if total <= len(means) * NO_CAPABILITY:
        return means[agent]  # nobody has succeeded: there is nothing to compare with
    if capabilities[agent] <= NO_CAPABILITY:
        return min_reward  # exactly, so that failures of an agent that never succeeds have advantage 0
    earned = math.fsum(mean - min_reward for mean in means.values())
    return min_reward + capabilities[agent] * earned / total


def is_uniform(rewards: PromptRewards) -> bool:
    """Return whether all responses to the prompt earned the same reward."""
    pooled = [reward for values in rewards.values() for reward in values]
    return min(pooled) == max(pooled)


def normalised_advantages(
    rewards: Sequence[float], baseline: float, std: float, epsilon: float
) -> tuple[float, ...]:
    """Return A = (R - mu) / (sigma + epsilon) for each reward (eq. 7)."""
    return tuple((reward - baseline) / (std + epsilon) for reward in rewards)


def zero_advantages(rewards: PromptRewards) -> dict[str, tuple[float, ...]]:
    """Return advantage 0 for every response."""
    return {agent: (0.0,) * len(values) for agent, values in rewards.items()}


def joint_mean(rewards: PromptRewards, agent: str) -> float:
    """Return the mean of all agents' mean rewards."""
    return capability_aware_baseline(rewards, agent, equal_capability, overshoot="keep")


def group_relative(
    rewards: PromptRewards, agent: str, normaliser: Normaliser | None, baseline_scale: float = 1.0
) -> Advantages:
    """Return (R - scale * mean) / std of all responses; without a normaliser R - mean, as in Dr. GRPO."""
    if is_uniform(rewards):
        return zero_advantages(rewards)
    baseline = baseline_scale * joint_mean(rewards, agent)
    std, epsilon = (
        (1.0, 0.0) if normaliser is None else (joint_std(rewards, normaliser.unbiased), normaliser.epsilon)
    )
    return {
        source: normalised_advantages(values, baseline, std, epsilon) for source, values in rewards.items()
    }


def group_relative_by_source(rewards: PromptRewards, normaliser: Normaliser) -> Advantages:
    """Return the advantages of every agent's responses among that agent's own (F-TIS, SAPO)."""
    return {
        source: group_relative({source: values}, source, normaliser)[source]
        for source, values in rewards.items()
    }
