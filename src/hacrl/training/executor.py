"""What the trainer asks of an executor: the verbs of all agents' workers, wherever the workers live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hacrl.algorithms.capability import Capabilities
from hacrl.engines.base import SyncReport
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.metrics import LearnReport
from hacrl.training.reporter import Reporter
from hacrl.training.tensor_files import WrittenFile
from hacrl.training.worker import Answer, Assignment


class Executor(Protocol):
    """Runs all agents' workers.

    Results come agent by agent, so that a run that stops in the middle of a step keeps what is done of it.

    In a synchronous run one thread calls everything. An asynchronous run (``asynchronous.max_staleness``)
    calls :meth:`answer`, :meth:`learn` and :meth:`publish` from several threads, each for a single agent:

    =============  =========================================================================================
    call           may be under way at the same time
    =============  =========================================================================================
    ``answer``     ``learn`` of the same agent; everything of other agents, also for other steps
    ``learn``      ``answer`` of the same agent; everything of other agents, also for other steps
    ``publish``    ``answer`` of the same agent, if :attr:`updates_while_generating`; everything of others
    =============  =========================================================================================

    The assignments have ``weights="published"`` then, so that no ``answer`` reads weights while ``learn``
    changes them. Each call gets a reporter of its own, whose observer may be used from any thread. The other
    verbs are called by the run's own thread while no ``learn`` and no ``publish`` is under way;
    ``state_dict`` and ``tensors`` also while agents answer. Any error but a loss that leaves a verb ends the
    run.

    A verb raises :class:`hacrl.errors.WorkerLostError`, after all other agents' results, for agents whose
    processes are gone. The trainer then asks the executor to place them again, or to drop them.
    """

    notes: tuple[str, ...]  # sentences for the user about what was decided when the workers were placed
    replaces_lost: bool  # whether :meth:`place_again` gives lost agents new processes

    @property
    def agents(self) -> dict[str, Agent]:
        """The agents that live in this process, by name."""
        ...

    @property
    def devices(self) -> dict[str, str]:
        """The device of every agent's learner, by agent."""
        ...

    @property
    def policy_versions(self) -> dict[str, int]:
        """The number of updates that every agent has made, by agent."""
        ...

    @property
    def rollouts_per_prompt(self) -> dict[str, int]:
        """The number of responses to each prompt, by agent."""
        ...

    def answer(
        self, assignment: Assignment, agents: Sequence[str], reporter: Reporter
    ) -> Iterator[tuple[str, Answer]]:
        """Yield each agent's verified rollouts as soon as they are there."""
        ...

    def learn(
        self,
        groups: Sequence[PromptGroup],
        capabilities: Capabilities,
        step: int,
        agents: Sequence[str],
        reporter: Reporter,
    ) -> Iterator[tuple[str, LearnReport]]:
        """Yield each agent's report as soon as the agent has learnt from all rollouts."""
        ...

    @property
    def updates_while_generating(self) -> dict[str, bool]:
        """By agent: whether :meth:`publish` may be called while the agent answers. For asynchronous runs."""
        ...

    def publish(self, agent: str) -> SyncReport:
        """Send an agent's weights to its engine, for asynchronous runs; return how they were sent.

        Called before the agent's first answer, and after its steps. On return every token that the engine
        samples comes from these weights, until the next call. The report has their policy version.
        """
        ...

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return every worker's state but for tensors, by agent; JSON-ready."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return every learner's trained weights and optimizer moments, by agent; not copied."""
        ...

    @property
    def writes_tensors(self) -> bool:
        """Whether checkpoints use :meth:`write_tensors` instead of :meth:`tensors`. Optional: False."""
        ...

    def write_tensors(self, folder: Path) -> dict[str, WrittenFile]:
        """Write every learner's tensors into :func:`tensor_file` of a folder; return the files by name.

        No process holds more than a few tensors of an agent more than it needs for training.
        """
        ...

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Restore what :meth:`state_dict` and :meth:`tensors` returned, of the agents that are named."""
        ...

    def save(self, agent: str, folder: Path) -> None:
        """Write one agent as a plain Hugging Face folder."""
        ...

    def place_again(self, agent: str) -> None:
        """Give a lost agent new processes, and the weights that it began the run with."""
        ...

    def drop(self, agent: str) -> None:
        """Free what the agent takes; it takes part in nothing any more."""
        ...

    def release(self) -> None:
        """End engines and reload weights to their devices. Workers can be used again afterwards."""
        ...
