"""Capability discrepancy coefficient (eq. 10): how much a source's response counts for a learner."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.algorithms.advantage import CapabilityRatio


def scaled_by_discrepancy(
    advantages: Sequence[float], learner: str, source: str, ratio: CapabilityRatio
) -> tuple[float, ...]:
    """A~ = omega(j, k) * A for responses of j != k: stronger sources count more, weaker ones less."""
    if learner == source:
        return tuple(advantages)
    coefficient = ratio(source, learner)
    return tuple(coefficient * advantage for advantage in advantages)
