"""How agents are evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from hacrl.types import Sampling

DEFAULT_MAX_NEW_TOKENS = 8192  # the evaluation length of the paper
DEFAULT_PROBLEMS = 200  # of a run's own evaluations
DEFAULT_BATCH = 64  # responses of thousands of tokens: a cache of 64 fits where 512 would not


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Every agent alone, on held-out problems, before and after training, and in between if asked."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    problems: int | None = None  # None: all that are held out, at most 200; 0: no evaluation
    samples_per_problem: int = 4
    temperature: float = 1.0  # 0: greedy
    max_new_tokens: int | None = None  # None: as in training
    every: int = 0  # steps between evaluations; 0: only before and after training

    def __post_init__(self) -> None:
        for key in ("problems", "every"):
            value = getattr(self, key)
            if value is not None and value < 0:
                raise ValueError(f"{key} must not be negative, not {value}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.samples_per_problem < 1:
            raise ValueError(f"samples_per_problem must be at least 1, not {self.samples_per_problem}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, not {self.temperature}")

    @property
    def most_problems(self) -> int:
        """How many are asked if the task holds out enough."""
        return DEFAULT_PROBLEMS if self.problems is None else self.problems

    def sampling(self, max_new_tokens: int) -> Sampling:
        """The distribution evaluation answers are drawn from; training's length unless one is set."""
        return Sampling(self.max_new_tokens or max_new_tokens, self.temperature)


@dataclass(frozen=True, kw_only=True)
class ExamSettings:
    """How ``hacrl eval`` asks. ``None``: the benchmark's own value, or that of the run whose task it is."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - read by the config layer

    samples: int | None = None  # k of avg@k
    pass_at: tuple[int, ...] = ()  # further k, for pass@k and best@k
    temperature: float | None = None  # None: greedy for one sample, 1 for several
    top_p: float = 1.0
    max_new_tokens: int | None = None  # None: DEFAULT_MAX_NEW_TOKENS, less where the context is shorter
    limit: int | None = None  # first problems only
    batch: int | None = None  # most responses decoded side by side
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("samples", "max_new_tokens", "limit", "batch"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        if any(k < 1 for k in self.pass_at):
            raise ValueError(f"pass_at must be at least 1, not {min(self.pass_at)}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must not be negative, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.samples is not None and max(self.pass_at, default=1) > self.samples:
            raise ValueError(
                f"pass_at {max(self.pass_at)} draws more responses than there are: samples is "
                f"{self.samples}; use samples {max(self.pass_at)} or more"
            )

    def samples_of(self, default: int) -> int:
        """Responses per problem: as asked, else the benchmark's number, but enough for every pass@k."""
        return self.samples or max(default, *self.pass_at, 1)

    def temperature_of(self, samples: int) -> float:
        """Equal greedy responses tell no more than one: several are sampled."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if samples == 1 else 1.0
