"""Settings of asynchronous runs: sampling beside learning, with bounded staleness."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.config.settings import Settings


@dataclass(frozen=True, kw_only=True)
class AsynchronousSettings(Settings):
    """Whether agents sample while they learn. Every engine then needs weights of its own."""

    max_staleness: int = 0
    """Steps that a learner may be ahead of the policy that sampled what it learns from. 0: synchronous, every
    response comes from the policy that learns from it. 1: the next batch is sampled while one is learnt."""
    patience: float | None = None
    """Seconds that a learner waits in each step for other agents' rollouts, when its own are there and
    nothing else keeps it. Then it learns without them; they teach it later if `max_staleness` allows.
    Default: it waits as long as it takes."""

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness must not be negative, not {self.max_staleness} (0: synchronous)")
        if self.patience is not None and not self.patience >= 0:
            raise ValueError(f"patience must not be negative, not {self.patience}; null means without limit")
        if self.patience is not None and not self.max_staleness:
            raise ValueError(
                f"patience={self.patience} needs max_staleness of at least 1: synchronous agents learn from "
                "the same rollouts in every step, so each waits for all"
            )

    @property
    def is_on(self) -> bool:
        """Whether the run is asynchronous."""
        return self.max_staleness > 0
