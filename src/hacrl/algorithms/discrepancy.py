"""Capability discrepancy coefficient (eq. 10): how much a source's responses count for a learner."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.algorithms.advantage import CapabilityRatio


def scaled_by_discrepancy(
    advantages: Sequence[float], learner: str, source: str, capability_ratio: CapabilityRatio
) -> tuple[float, ...]:
    """Return A~ = omega(j, k) * A for the responses of source j to learner k (eq. 10).

    Responses of a stronger source count more, those of a weaker source less. Own responses keep A.
    """
    if learner == source:
        return tuple(advantages)
    coefficient = capability_ratio(source, learner)
    return tuple(coefficient * advantage for advantage in advantages)
