"""The process of one party: the workers of its agents, driven by the run's process.

Ray runs :class:`AgentHost` as an actor. Inside, the agents live as under ``executor: local``: those that
share the process take turns on its device.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hacrl.executors.ray.events import Event, EventStream
from hacrl.executors.ray.state_transfer import ArrivingTensors, is_shared, write_shared
from hacrl.executors.ray.tensors import PackedTensor

if TYPE_CHECKING:
    from hacrl.algorithms.capability import Capabilities
    from hacrl.config.schema import RunConfig
    from hacrl.executors.local import LocalExecutor
    from hacrl.executors.ray.placement import Member
    from hacrl.rollouts.groups import PromptGroup
    from hacrl.tasks.base import Task
    from hacrl.training.worker import Assignment
    from hacrl.types import Problem

CHUNK = 64 * 2**20  # bytes of a file in one message


@dataclass(frozen=True)
class HostSpec:
    """What a process needs to load its agents."""

    config: RunConfig  # of the whole run
    devices: Mapping[str, str]  # of all agents
    train: Sequence[Problem]
    test: Sequence[Problem]
    task: Task | None  # None: made from the config


@dataclass(frozen=True)
class HostFacts:
    """What a process tells of itself once its agents are loaded."""

    policy_versions: dict[str, int]
    updates_while_generating: dict[str, bool]
    notes: tuple[str, ...]
    machine: str  # host name
    pid: int


def software() -> dict[str, str]:
    """Return the versions that must be the same in all processes of a run."""
    return {name: version(name) for name in ("hacrl", "torch", "transformers")}


class AgentHost:
    """The workers of some of a run's agents. Verbs are streams of events."""

    def __init__(self) -> None:
        self._found: LocalExecutor | None = None
        self._task: Task | None = None
        self._arriving: dict[str, ArrivingTensors] = {}  # by agent
        self._threads = ThreadPoolExecutor(thread_name_prefix="hacrl-verb")

    @property
    def _executor(self) -> LocalExecutor:
        assert self._found is not None, "load comes first"
        return self._found

    def software(self) -> dict[str, str]:
        """Return the versions of this process."""
        return software()

    def load(self, spec: HostSpec, agents: Sequence[str], members: Mapping[Member, Any]) -> Iterator[Event]:
        """Load the named agents, together with their further processes."""

        def load(stream: EventStream) -> None:
            stream.result(agents[0], self._load(spec, agents, members), 0)

        yield from EventStream().run(load, self._threads)

    def _load(self, spec: HostSpec, agents: Sequence[str], members: Mapping[Member, Any]) -> HostFacts:
        import ray
        import torch

        from hacrl.executors.ray.members import ActorRanks, ActorReplicas
        from hacrl.executors.workers import Elsewhere, make_executor_of
        from hacrl.tasks.base import CheckedTask
        from hacrl.tasks.registry import make_task

        if spec.config.threads is not None:
            torch.set_num_threads(spec.config.threads)
        self._task = spec.task if spec.task is not None else make_task(spec.config.task)
        checked = CheckedTask(self._task, spec.train, spec.test, dict(spec.devices), ())
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        ranks = {(one.agent, one.number): actor for one, actor in members.items() if one.role == "rank"}
        replicas: dict[str, dict[int, Any]] = {}
        for one, actor in members.items():
            if one.role == "replica":
                replicas.setdefault(one.agent, {})[one.number] = actor
        elsewhere = Elsewhere(
            ranks=ActorRanks(ranks, address) if ranks else None,
            replicas={agent: ActorReplicas(agent, actors, address) for agent, actors in replicas.items()},
        )
        self._found = make_executor_of(agents, spec.config, checked, {}, elsewhere)
        found = self._found
        updates = found.updates_while_generating
        return HostFacts(found.policy_versions, updates, found.notes, socket.gethostname(), os.getpid())

    def answer(self, assignment: Assignment, agents: Sequence[str]) -> Iterator[Event]:
        """Answer problems."""
        yield from self._stream(lambda reporter: self._executor.answer(assignment, agents, reporter))

    def learn(
        self, groups: Sequence[PromptGroup], capabilities: Capabilities, step: int, agents: Sequence[str]
    ) -> Iterator[Event]:
        """Learn from all agents' rollouts."""
        yield from self._stream(
            lambda reporter: self._executor.learn(groups, capabilities, step, agents, reporter)
        )

    def publish(self, agents: Sequence[str]) -> Iterator[Event]:
        """Send the weights of agents to their engines."""

        def publish(_: Any) -> Iterator[tuple[str, Any]]:
            for agent in agents:
                yield agent, self._executor.publish(agent)

        yield from self._stream(publish)

    def _stream(self, verb: Callable[[Any], Iterator[tuple[str, Any]]]) -> Iterator[Event]:
        def run(stream: EventStream) -> None:
            for agent, value in verb(stream.reporter):
                stream.result(agent, value, self._executor.policy_versions[agent])

        return EventStream().run(run, self._threads)

    def state_dict(self, agents: Sequence[str]) -> Iterator[Event]:
        """Give the agents' states."""

        def run(stream: EventStream) -> None:
            for agent, state in self._executor.state_dict().items():
                if agent in agents:
                    stream.result(agent, state, self._executor.policy_versions[agent])

        yield from EventStream().run(run, self._threads)

    def tensors(self, agents: Sequence[str]) -> Iterator[Event]:
        """Give the agents' tensors one by one, each as its name and its content."""

        def run(stream: EventStream) -> None:
            for agent in agents:
                worker = self._executor.workers[agent]
                for name, tensor in worker.tensors().items():
                    stream.result(agent, (name, PackedTensor.of(tensor)), worker.policy_version)

        yield from EventStream().run(run, self._threads)

    def write_tensors(self, folder: str, token: str, agents: Sequence[str]) -> Iterator[Event]:
        """Write the agents' tensors into files of the folder, or give the files in pieces.

        ``token``: what :func:`hacrl.executors.ray.state_transfer.share` wrote there. A process that finds it
        shares the disk with the run's process.
        """

        from hacrl.training.worker import AgentWorker

        def run(stream: EventStream) -> None:
            for agent in agents:
                worker = self._executor.workers[agent]
                if not isinstance(worker, AgentWorker):  # a frozen agent has no state of its own
                    continue
                version = worker.policy_version
                if is_shared(Path(folder), token):
                    stream.result(agent, write_shared(Path(folder), agent, worker.tensor_stream()), version)
                    continue
                for piece in worker.tensor_stream().file():
                    stream.result(agent, np.frombuffer(piece, np.uint8), version)

        yield from EventStream().run(run, self._threads)

    def expect(self, agent: str, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        """Make room for an agent's tensors, which come in pieces; ``shapes``: type and shape by name."""
        self._arriving[agent] = ArrivingTensors(shapes)

    def take(self, agent: str, name: str, start: int, piece: np.ndarray[Any, Any]) -> None:
        """Take a piece of a tensor, from byte ``start`` on."""
        self._arriving[agent].take(name, start, piece)

    def load_state(self, agent: str, state: Mapping[str, Any]) -> Iterator[Event]:
        """Restore an agent's state and the tensors that have arrived."""

        def run(stream: EventStream) -> None:
            arrived = self._arriving.pop(agent).tensors
            self._executor.load_state_dict({agent: state}, {agent: arrived})
            stream.result(agent, None, self._executor.policy_versions[agent])

        yield from EventStream().run(run, self._threads)

    def save(self, agent: str) -> Iterator[Event]:
        """Give the files of a Hugging Face folder in pieces: path, bytes."""

        def run(stream: EventStream) -> None:
            folder = Path(tempfile.mkdtemp(prefix="hacrl-save-"))
            try:
                self._executor.save(agent, folder)
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        for piece in _pieces(path):
                            stream.result(agent, (path.relative_to(folder).as_posix(), piece), 0)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        yield from EventStream().run(run, self._threads)

    def close(self) -> None:
        """End engines, further ranks and the verifier's processes."""
        try:
            if self._found is not None:
                self._found.release()
        finally:
            if self._task is not None:
                self._task.close()


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield file.read(CHUNK)
        while piece := file.read(CHUNK):
            yield piece
