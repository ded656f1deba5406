"""An executor that gives every agent's worker a process of its own, by plain multiprocessing."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from hacrl.algorithms.capability import Capabilities
from hacrl.config.schema import RunConfig
from hacrl.executors.workers import load_agents, make_worker
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.runs.preflight import preflight
from hacrl.tasks.base import CheckedTask
from hacrl.tasks.registry import make_task
from hacrl.training.metrics import LearnReport
from hacrl.training.reporter import Reporter
from hacrl.training.worker import Answer, Assignment


def serve(connection: Connection, config: RunConfig, name: str) -> None:
    """Run one agent's worker: call the verbs that come through the connection until None comes."""
    torch.set_num_threads(config.threads or 1)
    checked = preflight(config, make_task(config.task))
    alone = [settings for settings in config.agents if settings.name == name]
    (agent,) = load_agents(
        type(config)(agents=tuple(alone), output=config.output, seed=config.seed), checked, {}
    )
    worker = make_worker(config, alone[0], agent, checked)
    while (request := connection.recv()) is not None:
        verb, arguments = request
        found = getattr(worker, verb)
        connection.send(found(*arguments) if callable(found) else found)
    worker.close()
    checked.task.close()


class ProcessExecutor:
    """Drives workers through pipes, all at the same time."""

    notes: tuple[str, ...] = ()
    replaces_lost = False

    def __init__(self, config: RunConfig) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._config = config
        self._connections: dict[str, Connection] = {}
        self._processes = []
        for agent in config.agents:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, config, agent.name), daemon=True)
            process.start()
            theirs.close()
            self._connections[agent.name] = ours
            self._processes.append(process)

    def _all(
        self, verb: str, *arguments: Any, agents: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Any]]:
        names = list(self._connections) if agents is None else agents
        for name in names:
            self._connections[name].send((verb, arguments))
        for name in names:
            yield name, self._connections[name].recv()

    @property
    def agents(self) -> dict[str, Agent]:
        return {}

    @property
    def devices(self) -> dict[str, str]:
        return dict.fromkeys(self._connections, "cpu")

    @property
    def policy_versions(self) -> dict[str, int]:
        return {name: state["policy_version"] for name, state in self.state_dict().items()}

    @property
    def rollouts_per_prompt(self) -> dict[str, int]:
        return {agent.name: self._config.rollouts_per_prompt(agent) for agent in self._config.agents}

    def answer(
        self, assignment: Assignment, agents: Sequence[str], reporter: Reporter
    ) -> Iterator[tuple[str, Answer]]:
        yield from self._all("answer", assignment, agents=agents)

    def learn(
        self,
        groups: Sequence[PromptGroup],
        capabilities: Capabilities,
        step: int,
        agents: Sequence[str],
        reporter: Reporter,
    ) -> Iterator[tuple[str, LearnReport]]:
        yield from self._all("learn", groups, capabilities, step, agents=agents)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        return dict(self._all("state_dict"))

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        return dict(self._all("tensors"))

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        for name in self._connections:
            list(self._all("load_state_dict", state[name], dict(tensors[name]), agents=[name]))

    def save(self, agent: str, folder: Path) -> None:
        list(self._all("save", folder, agents=[agent]))

    def release(self) -> None:
        for connection in self._connections.values():
            connection.send(None)
        for process in self._processes:
            process.join(60)
        self._connections = {}


def make(config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> ProcessExecutor:
    """Make the executor, as ``executor: tests.support.process_executor:make`` asks."""
    return ProcessExecutor(config)
