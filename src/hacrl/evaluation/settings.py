"""How agents are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.types import Sampling


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Every agent alone, on held-out problems, before and after training, and in between if asked."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    problems: int = 200  # 0: no evaluation
    samples_per_problem: int = 4
    temperature: float = 1.0  # 0: greedy
    max_new_tokens: int | None = None  # None: as in training
    every: int = 0  # steps between evaluations; 0: only before and after training

    def __post_init__(self) -> None:
        for key in ("problems", "every"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative, not {getattr(self, key)}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.samples_per_problem < 1:
            raise ValueError(f"samples_per_problem must be at least 1, not {self.samples_per_problem}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The distribution evaluation answers are drawn from; training's length unless one is set."""
        return Sampling(self.max_new_tokens or max_new_tokens, self.temperature)
