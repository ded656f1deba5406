"""Agent-capability-aware advantage (eq. 6, 7) for the responses to one prompt.

    mu_k  = 1/n * sum_j mean_i omega(k, j) * R(y_i^j)        what agent k is expected to earn here
    A_i^k = (R(y_i^k) - mu_k) / sigma_joint                  sigma over the rewards of all responses

With equal G for all agents, 1/n * mean_i is the paper's 1/(nG); with unequal G every agent still
weighs the same. With one agent, omega is 1 and this is the group-relative advantage of GRPO and GSPO.
Sums are exact (``fsum``), so that the order of agents cannot matter.

Capability discrepancy coefficient (eq. 10): how much a source's response counts for a learner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

PromptRewards = Mapping[str, Sequence[float]]  # agent -> rewards of its responses to one prompt
CapabilityRatio = Callable[[str, str], float]  # omega(k, j)


def equal_capability(_k: str, _j: str) -> float:
    """omega = 1: the ratio of agents that are not told apart."""
    return 1.0


def joint_std(rewards: PromptRewards, unbiased: bool = True) -> float:
    """sigma_joint: standard deviation over the rewards of all agents' responses; 0 for a single response."""
    pooled = [reward for values in rewards.values() for reward in values]
    degrees = len(pooled) - 1 if unbiased else len(pooled)
    if degrees == 0:
        return 0.0
    mean = math.fsum(pooled) / len(pooled)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in pooled) / degrees)


def capability_aware_baseline(
    rewards: PromptRewards,
    agent: str,
    ratio: CapabilityRatio,
    overshoot: Literal["own_mean", "keep"] = "own_mean",
    max_reward: float | None = 1.0,
) -> float:
    """mu_k (eq. 6). A baseline above the largest possible reward is replaced by the agent's own mean."""
    means = {source: math.fsum(values) / len(values) for source, values in rewards.items()}
    baseline = math.fsum(ratio(agent, source) * mean for source, mean in means.items()) / len(means)
    if overshoot == "own_mean" and max_reward is not None and baseline > max_reward:
        return means[agent]
    return baseline


def is_uniform(rewards: PromptRewards) -> bool:
    """Whether all responses to the prompt earned the same: there is nothing to learn from comparing them."""
    pooled = [reward for values in rewards.values() for reward in values]
    return min(pooled) == max(pooled)


def normalised(rewards: Sequence[float], baseline: float, std: float, epsilon: float) -> tuple[float, ...]:
    """(R - mu) / (sigma + epsilon) (eq. 7)."""
    return tuple((reward - baseline) / (std + epsilon) for reward in rewards)


def zero_advantages(rewards: PromptRewards) -> dict[str, tuple[float, ...]]:
    """Advantage 0 for every response."""
    return {agent: (0.0,) * len(values) for agent, values in rewards.items()}


def scaled_by_discrepancy(
    advantages: Sequence[float], learner: str, source: str, ratio: CapabilityRatio
) -> tuple[float, ...]:
    """A~ = omega(j, k) * A for responses of j != k: stronger sources count more, weaker ones less."""
    if learner == source:
        return tuple(advantages)
    coefficient = ratio(source, learner)
    return tuple(coefficient * advantage for advantage in advantages)
