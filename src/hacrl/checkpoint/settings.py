"""How often a run's whole state is written down, and how much of that is kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Everything needed to go on exactly: weights, optimizers, capabilities, position."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    every: int = 20  # steps, and at the end; 0: only when a run is stopped by a signal
    keep_last: int = 2  # the newest; more than one, so that a damaged one has a predecessor
    keep_best: int = 0  # besides those, the ones with the best mean held-out accuracy
    background: bool = (
        True  # write while the next step goes on; copying to the CPU's memory is all it waits for
    )

    def __post_init__(self) -> None:
        for key, least in (("every", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"{key} must be at least {least}, not {getattr(self, key)}")
