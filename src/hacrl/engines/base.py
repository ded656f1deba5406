"""The seam between asking for responses and whatever produces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hacrl.types import Problem, Rollout, Sampling

Finished = Callable[[int, Rollout], None]  # position in the answer of ``generate``, and the rollout


@dataclass(frozen=True, slots=True)
class EngineReport:
    """How an engine with weights of its own was brought to the agent's policy."""

    policy_version: int
    weight_sync: str  # which way the weights went
    logprob_gap: float  # mean |engine's - learner's log-probability| per token of a few responses, afterwards
    restarts: int  # times the engine died and was started again, since the run began


class RolloutEngine(Protocol):
    """Samples responses of one agent, with the log-probabilities they were sampled with."""

    @property
    def shares_weights(self) -> bool:
        """Whether it computes with the learner's own tensors, so that it is always at the agent's policy."""
        ...

    @property
    def is_apart(self) -> bool:
        """Whether it computes with memory of its own, beside whatever else goes on, in any thread."""
        ...

    def prepare(self, proven: bool = True) -> EngineReport | None:
        """Be ready to generate with the agent's policy as it is now.

        An engine with weights of its own reports how it got there once that is proven, which may be left to
        the next responses.
        """
        ...

    def generate(
        self,
        problems: Sequence[Problem],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        on_finished: Finished | None = None,
    ) -> list[Rollout]:
        """``samples_per_prompt`` responses to each problem, problem by problem; a seed fixes them.

        ``on_finished`` is told of each response as soon as it has ended, in any order.
        """
        ...

    def take_notes(self) -> list[str]:
        """Sentences for the user since the last call."""
        ...

    def state_dict(self) -> dict[str, int]:
        """What it has learnt to keep to, e.g. how many responses fit side by side; JSON-ready."""
        ...

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` gave."""
        ...

    def rest(self) -> None:
        """Generation is over for now: give back memory that learning could use."""
        ...

    def close(self) -> None:
        """Let go of processes and memory. May be called more than once."""
        ...
