"""Settings of evaluation: a run's own on held-out problems, and ``hacrl eval`` on benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hacrl.config.settings import Settings
from hacrl.plain_text import half_character
from hacrl.types import Sampling

DEFAULT_MAX_NEW_TOKENS = 8192  # the paper's length in benchmarks
DEFAULT_PROBLEMS = 200  # most problems in a run's own evaluation, unless the recipe says how many
DEFAULT_BATCH = 64  # responses decoded side by side in benchmarks: a KV cache for 8192 tokens of each


def check_stop_strings(stop: Sequence[str]) -> None:
    """Raise ValueError for stop strings that would end every response, or never one."""
    for text in stop:
        if not text:
            raise ValueError("stop must not hold an empty text, which would end every response at once")
        if "\ufffd" in text or half_character(text) is not None:
            raise ValueError(f"stop {text!r} holds half a character, which no response has")


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Settings):
    """Every agent alone on held-out problems, before and after training and, if asked, in between."""

    problems: int | None = None
    """Number of held-out problems. Default: all of them, at most 200; 0: no evaluation."""
    samples_per_problem: int = 4
    """Responses to each problem."""
    temperature: float = 1.0
    """Sampling temperature; 0: greedy."""
    max_new_tokens: int | None = None
    """Longest response in tokens. Default: `rollout.max_new_tokens`."""
    every: int = 0
    """Steps between evaluations; 0: only before and after training."""

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
        """Number of problems if the task holds out enough."""
        return DEFAULT_PROBLEMS if self.problems is None else self.problems

    def sampling(self, training: Sampling) -> Sampling:
        """Return how responses are sampled: stop strings, and length unless set, as in ``training``."""
        length = self.max_new_tokens or training.max_new_tokens
        return Sampling(length, self.temperature, stop=training.stop)


@dataclass(frozen=True, kw_only=True)
class BenchmarkSettings(Settings):
    """How ``hacrl eval`` generates responses. These are options of the command, not keys of a recipe."""

    samples: int | None = None
    """k of avg@k. Default: the benchmark's own k."""
    pass_at: tuple[int, ...] = ()
    """Further k, for pass@k and best@k."""
    temperature: float | None = None
    """Sampling temperature. Default: 0 (greedy) for one sample, 1 for several."""
    top_p: float = 1.0
    """Nucleus sampling: share of the probability that the sampled tokens come from."""
    stop: tuple[str, ...] | None = None
    """Texts that end a response. Default: `rollout.stop` of the model's run; none for other models."""
    max_new_tokens: int | None = None
    """Longest response in tokens. Default: 8192, or less where the model's context is shorter."""
    limit: int | None = None
    """Use only the first so many problems. Default: all."""
    batch: int | None = None
    """Most responses decoded side by side. Default: 64, or `rollout.max_batch` of the run whose task it
    is."""
    seed: int = 0
    """Seed of the responses."""

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
        check_stop_strings(self.stop or ())
        if self.samples is not None and max(self.pass_at, default=1) > self.samples:
            raise ValueError(
                f"pass_at {max(self.pass_at)} draws more responses than there are: samples is "
                f"{self.samples}; use samples {max(self.pass_at)} or more"
            )

    def samples_of(self, default: int) -> int:
        """Return the responses per problem: ``samples``, else enough for avg@``default`` and every pass@k."""
        return self.samples or max(default, *self.pass_at, 1)

    def stop_of(self, run: tuple[str, ...]) -> tuple[str, ...]:
        """Return the stop strings; ``run`` are those of the model's run."""
        return run if self.stop is None else self.stop

    def temperature_of(self, samples: int) -> float:
        """Return the temperature for so many responses: several greedy ones would be equal."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if samples == 1 else 1.0
