"""The other ranks of a run's sharded agents, as child processes on this machine.

This process is rank 0 of every sharded agent. All processes meet in one torch.distributed world, in which
every agent's ranks are a group.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hacrl.config.schema import RunConfig
from hacrl.errors import TrainingError
from hacrl.executors.learners import load_shards
from hacrl.models.device import rank_devices
from hacrl.models.rank_group import Meeting, RankGroup, join, leave, listen, make_groups
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.processes import ProcessError, SupervisedProcess, python_command, python_environment

PROGRAM = "hacrl.executors.rank_program"
START_SECONDS = 300.0  # until a rank has imported torch and has connected
END_SECONDS = 5.0  # from the announcement of the end until a rank is terminated
LOOPBACK = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
LIBRARY_NETWORK = "GLOO_SOCKET_IFNAME"


class RankProcesses:
    """Starts the other ranks, and ends them."""

    def __init__(self, config: RunConfig, devices: Mapping[str, str]) -> None:
        """Start all ranks of the run's sharded agents, and wait until they are connected."""
        self._config = config
        self._sharded = [agent for agent in config.agents if agent.ranks > 1]
        self._folder = Path(tempfile.mkdtemp(prefix="hacrl-ranks-"))
        self._processes: dict[tuple[str, int], SupervisedProcess] = {}  # by agent and rank
        self.groups: dict[str, RankGroup] = {}
        os.environ.setdefault(LIBRARY_NETWORK, LOOPBACK)  # all ranks are on this machine
        try:
            self._start(devices)
        except BaseException:
            self.end()
            raise

    def _start(self, devices: Mapping[str, str]) -> None:
        members: dict[str, list[int]] = {}  # agent -> numbers of its processes, by rank
        count = 1  # this process
        for agent in self._sharded:
            members[agent.name] = [0, *range(count, count + agent.ranks - 1)]
            count += agent.ranks - 1
        patience = max(agent.fsdp.timeout for agent in self._sharded)
        store = listen(Meeting("127.0.0.1", 0, 0, count), START_SECONDS)
        for agent in self._sharded:
            for rank, number in enumerate(members[agent.name]):
                if rank == 0:
                    continue
                arguments = {
                    "meeting": asdict(Meeting("127.0.0.1", store.port, number, count)),
                    "members": members,
                    "agent": agent.name,
                    "device": rank_devices(devices[agent.name], agent.ranks)[rank],
                    "timeout": patience,
                    "timeouts": {other.name: other.fsdp.timeout for other in self._sharded},
                }
                self._processes[agent.name, rank] = self._launch(agent.name, rank, json.dumps(arguments))
        for (name, rank), process in self._processes.items():
            is_ready = partial(store.check, [ready_key(name, rank)])
            try:
                process.wait_until_ready(is_ready)
            except ProcessError as error:
                raise TrainingError(str(error)) from error
        join(store, Meeting("127.0.0.1", store.port, 0, count), devices[self._sharded[0].name], patience)
        timeouts = {agent.name: agent.fsdp.timeout for agent in self._sharded}
        self.groups = make_groups(store, members, timeouts, self._explain_loss)

    def _launch(self, agent: str, rank: int, arguments: str) -> SupervisedProcess:
        process = SupervisedProcess(
            f"rank {rank} of agent {agent!r}",
            python_command(PROGRAM, arguments),
            python_environment(),
            self._folder / f"{agent}-{rank}.log",
            START_SECONDS,
        )
        process.launch()
        return process

    def load(self, agent: str, device: str) -> ShardedAgent:
        """Load a sharded agent together with its other ranks."""
        return load_shards(self._config, device, self.groups[agent])

    def _explain_loss(self, agent: str) -> str:
        """Return how the agent's other processes have ended, for messages; empty if all of them run."""
        ended = []
        for (name, _), process in self._processes.items():
            if name == agent and not process.is_alive():
                ended.append(f"{process.name}: {process.why_ended()}; {process.end_of_log()}")
        return "; ".join(ended)

    def end(self) -> None:
        """End all ranks. Their agents cannot be used any more."""
        for group in self.groups.values():
            with suppress(TrainingError, RuntimeError):  # a group that has failed cannot be told
                group.announce("end")
            group.close()
        for process in self._processes.values():
            process.end(END_SECONDS if self.groups else 0.0)
        self._processes = {}
        self.groups = {}
        leave()
        shutil.rmtree(self._folder, ignore_errors=True)


def ready_key(agent: str, rank: int) -> str:
    """Return the key that a rank sets in the store once it is connected."""
    return f"hacrl/ready/{agent}/{rank}"
