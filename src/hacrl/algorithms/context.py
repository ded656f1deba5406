"""What a rule for sharing may know of a learner's step besides the rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepContext:
    """One learner's step."""

    progress: float = 0.0  # share of the run's steps that are done
    capabilities: Mapping[str, float] = field(default_factory=dict)  # P_k by agent
    trusted: frozenset[str] = frozenset()  # the partners that the learner trusts (``alignment.py``)
