"""The task protocol: problems to train on, held-out problems, and a verifier.

Any object with the members of :class:`Task` is a task; it needs no base class. Optional members:

=========================  =================================================================================
``independent_verdicts``   True if a verdict depends on its own response alone and another thread may call
                           ``verify``: responses are then verified while others are being generated.
``self_test()``            Try the task's own code before models load; see :class:`SelfTesting`.
``trainer_state``          A run sets it to its state; see :class:`ReadsTrainerState`.
``notes``                  Sentences that the user should read, e.g. how many rows were left out.
``solutions``              Full solutions of some training problems, as texts: a run's start notes that
                           ``rollout.max_new_tokens`` is too short for them. Without: the gold answers.
``source``                 Where the problems come from, as the results of ``hacrl eval`` name it.
``open_environments()``    A new pool of environments: responses are episodes then. Needs
                           ``episode_limits``; see :class:`hacrl.tasks.episodes.PlaysEpisodes`.
=========================  =================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hacrl.types import Problem, Rollout, Verdict

REQUIRED_MEMBERS = ("name", "max_reward", "train", "test", "verify", "close")


class Task(Protocol):
    """A verifiable task. ``train`` and ``test`` never share a problem id."""

    name: str
    max_reward: float | None  # the largest possible reward; None if unknown

    @property
    def train(self) -> Sequence[Problem]:
        """Problems to train on."""
        ...

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order, so that every prefix is a fair sample."""
        ...

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Return one verdict per rollout, in order. A response's text must never make this raise."""
        ...

    def close(self) -> None:
        """End worker processes, if there are any. May be called more than once."""
        ...


@runtime_checkable
class SelfTesting(Protocol):
    """A task that runs the user's code and can try it before models load."""

    def self_test(self) -> None:
        """Verify a few made-up responses; raise :class:`hacrl.errors.TaskError` if that fails."""
        ...


@runtime_checkable
class ReadsTrainerState(Protocol):
    """A task that wants the run's state, e.g. for a reward that depends on the step."""

    trainer_state: Any  # transformers' TrainerState, kept up to date by the run


@dataclass(frozen=True)
class CheckedTask:
    """A task that passed the checks before a run, with the problems and devices that the run will use."""

    task: Task
    train: Sequence[Problem]  # those whose prompts fit every agent
    test: Sequence[Problem]  # those that evaluations during training use
    devices: Mapping[str, str]  # agent -> device
    notes: tuple[str, ...]  # sentences that the user should read
    warnings: tuple[str, ...] = ()  # sentences on settings with which the run can hardly succeed
    is_object: bool = False  # whether the task was given as an object, so that no config can make it again
