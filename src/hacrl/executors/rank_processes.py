"""The other ranks of a run's sharded agents, as child processes on this machine or wherever they are placed.

This process is rank 0 of every sharded agent. All processes meet in one torch.distributed world, in which
every agent's ranks are a group.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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


class RankProcess(Protocol):
    """The process of one rank, wherever it runs."""

    name: str

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait. Raise ProcessError with the reason if the process ends, or is not ready in time."""
        ...

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        ...

    def why_ended(self) -> str:
        """Return how the process ended."""
        ...

    def end_of_log(self) -> str:
        """Return the last lines that the process wrote, and where the rest is."""
        ...

    def end(self, patience: float = 0.0) -> None:
        """End the process: wait ``patience`` seconds, then kill it. May be called more than once."""
        ...


class RankLauncher(Protocol):
    """Starts the processes of ranks somewhere."""

    host: str  # the address at which rank 0 listens for the others

    def device(self, first: str, ranks: int, rank: int) -> str:
        """Return the device of a rank, where ``first`` is that of rank 0."""
        ...

    def launch(self, agent: str, rank: int, arguments: dict[str, Any]) -> RankProcess:
        """Start a rank: ``hacrl.executors.rank_program.main(arguments)``."""
        ...

    def close(self) -> None:
        """Remove what launching has left behind; all processes have ended."""
        ...


class ChildRanks:
    """Starts ranks as child processes on this machine."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hacrl-ranks-"))
        os.environ.setdefault(LIBRARY_NETWORK, LOOPBACK)  # all ranks are on this machine

    def device(self, first: str, ranks: int, rank: int) -> str:
        """Return the device: GPUs follow each other."""
        return rank_devices(first, ranks)[rank]

    def launch(self, agent: str, rank: int, arguments: dict[str, Any]) -> RankProcess:
        """Start a rank."""
        process = SupervisedProcess(
            f"rank {rank} of agent {agent!r}",
            python_command(PROGRAM, json.dumps(arguments)),
            python_environment(),
            self._folder / f"{agent}-{rank}.log",
            START_SECONDS,
        )
        process.launch()
        return process

    def close(self) -> None:
        """Delete the logs."""
        shutil.rmtree(self._folder, ignore_errors=True)


class RankProcesses:
    """Starts the other ranks, and ends them."""

    def __init__(
        self,
        config: RunConfig,
        agents: Sequence[str],
        devices: Mapping[str, str],
        launcher: RankLauncher | None = None,
    ) -> None:
        """Start all ranks of the named agents that have several, and wait until they are connected."""
        self._config = config
        self._sharded = [agent for agent in config.agents if agent.ranks > 1 and agent.name in agents]
        self._launcher = launcher or ChildRanks()
        self._processes: dict[tuple[str, int], RankProcess] = {}  # by agent and rank
        self.groups: dict[str, RankGroup] = {}
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
        host = self._launcher.host
        store = listen(Meeting(host, 0, 0, count), START_SECONDS)
        for agent in self._sharded:
            for rank, number in enumerate(members[agent.name]):
                if rank == 0:
                    continue
                arguments = {
                    "meeting": asdict(Meeting(host, store.port, number, count)),
                    "members": members,
                    "agent": agent.name,
                    "device": self._launcher.device(devices[agent.name], agent.ranks, rank),
                    "timeout": patience,
                    "timeouts": {other.name: other.fsdp.timeout for other in self._sharded},
                }
                self._processes[agent.name, rank] = self._launcher.launch(agent.name, rank, arguments)
        for (name, rank), process in self._processes.items():
            is_ready = partial(store.check, [ready_key(name, rank)])
            try:
                process.wait_until_ready(is_ready)
            except ProcessError as error:
                raise TrainingError(str(error)) from error
        join(store, Meeting(host, store.port, 0, count), devices[self._sharded[0].name], patience)
        timeouts = {agent.name: agent.fsdp.timeout for agent in self._sharded}
        self.groups = make_groups(store, members, timeouts, self._explain_loss)

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
        self._launcher.close()


def ready_key(agent: str, rank: int) -> str:
    """Return the key that a rank sets in the store once it is connected."""
    return f"hacrl/ready/{agent}/{rank}"
