"""``executor: local``: all workers in this process; agents that share a device take turns on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hacrl.algorithms.capability import Capabilities
from hacrl.engines.base import SyncReport
from hacrl.engines.concurrent import MainThread, run_concurrently
from hacrl.executors.rank_processes import RankProcesses
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.frozen import FrozenWorker
from hacrl.training.metrics import LearnReport
from hacrl.training.prefetch import Prefetch
from hacrl.training.reporter import Reporter
from hacrl.training.tensor_files import WrittenFile, tensor_file, write_tensors
from hacrl.training.worker import AgentWorker, Answer, Assignment
from hacrl.types import Rollout

Worker = AgentWorker | FrozenWorker


class LocalExecutor:
    """Runs workers one after the other; those whose engines run concurrently generate at the same time."""

    replaces_lost = False  # what is lost in this process is lost with the run

    def __init__(
        self,
        workers: Sequence[Worker],
        residency: Residency | None = None,
        ranks: RankProcesses | None = None,
    ) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self._ranks = ranks  # the other ranks of agents that have several
        self.residency = residency or Residency()
        self.notes = self.residency.notes

    @property
    def agents(self) -> dict[str, Agent]:
        """All agents by name, but for endpoints."""
        return {name: worker.agent for name, worker in self.workers.items() if worker.agent is not None}

    @property
    def devices(self) -> dict[str, str]:
        """The device of every agent's learner by agent."""
        return {name: worker.device for name, worker in self.workers.items()}

    @property
    def policy_versions(self) -> dict[str, int]:
        """The number of updates by agent."""
        return {name: worker.policy_version for name, worker in self.workers.items()}

    @property
    def rollouts_per_prompt(self) -> dict[str, int]:
        """The number of responses to each prompt by agent."""
        return {name: worker.settings.rollouts_per_prompt for name, worker in self.workers.items()}

    @property
    def updates_while_generating(self) -> dict[str, bool]:
        """Whether the engine can be updated while it generates, by agent."""
        return {name: worker.sampler.updates_while_generating for name, worker in self.workers.items()}

    def publish(self, agent: str) -> SyncReport:
        """Send an agent's weights to its engine."""
        return self.workers[agent].publish()

    def answer(
        self, assignment: Assignment, agents: Sequence[str], reporter: Reporter
    ) -> Iterator[tuple[str, Answer]]:
        """Yield each agent's verified rollouts, turn by turn."""
        for turn in self._turns(agents):
            yield from self._answer_together(assignment, turn, reporter).items()

    def learn(
        self,
        groups: Sequence[PromptGroup],
        capabilities: Capabilities,
        step: int,
        agents: Sequence[str],
        reporter: Reporter,
    ) -> Iterator[tuple[str, LearnReport]]:
        """Yield each agent's report. The next agent's samples are built while one learns."""
        workers = [worker for name in agents if isinstance(worker := self.workers[name], AgentWorker)]
        builds = [partial(worker.build_samples, groups, capabilities, step) for worker in workers]
        with Prefetch(builds) as prefetched:
            for worker in workers:
                with reporter.agent(worker.name).phase("learn"):
                    self.residency.prepare_learning(worker.name)
                    report = worker.update(prefetched.next(), step)
                yield worker.name, report

    def _turns(self, agents: Sequence[str]) -> list[list[Worker]]:
        """Return groups of workers that generate concurrently: first all that can, then the others singly."""
        workers = [self.workers[name] for name in agents]
        together = [
            worker
            for worker in workers
            if worker.sampler.runs_concurrently and self.residency.keeps_weights(worker.name)
        ]
        one_by_one = [[worker] for worker in workers if worker not in together]
        return [together, *one_by_one] if together else one_by_one

    def _answer_together(
        self, assignment: Assignment, turn: Sequence[Worker], reporter: Reporter
    ) -> dict[str, Answer]:
        """Generate at the same time; verify in this thread, in the order of the agents."""

        def generate(worker: Worker, main: MainThread) -> list[Rollout]:
            return worker.generate(assignment, reporter.agent(worker.name, main))

        for worker in turn:
            self.residency.prepare_generation(worker.name)
        try:
            with reporter.generating():
                generated = run_concurrently({worker.name: partial(generate, worker) for worker in turn})
                ended = {worker.name: worker.end_generation(assignment) for worker in turn}
                return {
                    worker.name: Answer(
                        worker.verify(assignment, generated[worker.name], reporter.agent(worker.name)),
                        *ended[worker.name],
                    )
                    for worker in turn
                }
        finally:
            for worker in turn:
                worker.abandon_answer()

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return every worker's state by agent."""
        return {name: worker.state_dict() for name, worker in self.workers.items()}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return every worker's tensors by agent."""
        return {name: worker.tensors() for name, worker in self.workers.items()}

    @property
    def writes_tensors(self) -> bool:
        """Whether an agent has ranks: a copy of all its tensors is what no single process need hold."""
        return self._ranks is not None

    def write_tensors(self, folder: Path) -> dict[str, WrittenFile]:
        """Write every worker's tensors into a file of the folder; return the files by name."""
        return {
            tensor_file(name): write_tensors(folder / tensor_file(name), worker.tensor_stream())
            for name, worker in self.workers.items()
            if isinstance(worker, AgentWorker)  # a frozen agent has no state of its own
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Restore the workers of the agents that are named."""
        for name in state:
            self.workers[name].load_state_dict(state[name], tensors.get(name, {}))

    def save(self, agent: str, folder: Path) -> None:
        """Write one agent as a Hugging Face folder."""
        worker = self.workers[agent]
        assert isinstance(worker, AgentWorker), "a frozen agent is not saved"
        self.residency.prepare_generation(agent)  # brings its weights to the device
        worker.save(folder)

    def place_again(self, agent: str) -> None:
        """Fail: see :attr:`replaces_lost`."""
        raise AssertionError(f"executor: local replaces no lost agents, and {agent!r} is lost")

    def drop(self, agent: str) -> None:
        """End the agent's engine, and forget its worker."""
        self.workers.pop(agent).close()

    def release(self) -> None:
        """End engines and other ranks, and reload weights to their devices."""
        with ExitStack() as stack:  # if an engine cannot be ended, the others are ended nevertheless
            if self._ranks is not None:
                stack.callback(self._ranks.end)
            stack.callback(self.residency.reload_all_weights)
            for worker in self.workers.values():
                stack.callback(worker.close)
