"""Further processes of an agent, as Ray actors on this or other machines: its other ranks, its replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hacrl.errors import WorkerLostError
from hacrl.executors.rank_processes import LIBRARY_NETWORK, LOOPBACK, START_SECONDS
from hacrl.processes import POLL_SECONDS, ProcessError


class MemberActor:
    """A further process of an agent. Ray runs this class with the process's share of a GPU."""

    def follow(self, arguments: dict[str, Any], is_on_one_host: bool) -> int:
        """Follow rank 0 to the end, as another rank; return the exit code."""
        from hacrl.executors.rank_program import main

        if is_on_one_host:
            os.environ.setdefault(LIBRARY_NETWORK, LOOPBACK)
        return main(arguments)

    def sample(self, arguments: dict[str, Any]) -> int:
        """Serve the agent's engine to the end, as a replica; return the exit code."""
        from hacrl.engines.replicas.program import main

        return main(arguments)

    def node(self) -> str:
        """Return Ray's id of the machine."""
        import ray

        return str(ray.get_runtime_context().get_node_id())


class ActorRanks:
    """Starts ranks in actors that the run has placed. Implements ``RankLauncher``."""

    def __init__(self, actors: Mapping[tuple[str, int], Any], address: str) -> None:
        """``actors``: by agent and rank; ``address``: at which other machines find this process."""
        import ray

        own = ray.get_runtime_context().get_node_id()
        self._actors = actors
        self._is_on_one_host = set(ray.get([actor.node.remote() for actor in actors.values()])) <= {own}
        self.host = "127.0.0.1" if self._is_on_one_host else address
        if self._is_on_one_host:
            os.environ.setdefault(LIBRARY_NETWORK, LOOPBACK)

    def device(self, first: str, ranks: int, rank: int) -> str:
        """Return the device: every actor sees its own GPU only."""
        return only_device(first)

    def launch(self, agent: str, rank: int, arguments: dict[str, Any]) -> ActorProcess:
        """Start a rank."""
        running = self._actors[agent, rank].follow.remote(arguments, self._is_on_one_host)
        return ActorProcess(f"rank {rank} of agent {agent!r}", running)

    def close(self) -> None:
        """Do nothing: the actors are the run's."""


class ActorReplicas:
    """Starts an agent's replicas in actors that the run has placed. Implements ``ReplicaPlacement``."""

    replaces_agent = True

    def __init__(self, agent: str, actors: Mapping[int, Any], address: str) -> None:
        """``actors``: by number of the replica; ``address``: at which other machines find this process."""
        self.host = address
        self._agent = agent
        self._actors = actors

    def start(self, name: str, number: int, arguments: dict[str, Any]) -> ActorProcess:
        """Start a replica. Raise WorkerLostError if its actor is gone: the agent is then placed anew."""
        import ray

        try:
            ray.get(self._actors[number].node.remote(), timeout=START_SECONDS)
        except Exception as error:  # Ray's errors have no common base that is documented
            raise WorkerLostError({self._agent: f"the process of {name} is gone"}) from error
        device = only_device(arguments["device"])
        return ActorProcess(name, self._actors[number].sample.remote({**arguments, "device": device}))


def only_device(device: str) -> str:
    """Return the device of a process that sees one GPU only."""
    return "cuda:0" if device.startswith("cuda") else device


class ActorProcess:
    """A rank or replica at work in its actor. Implements ``RankProcess`` and ``ReplicaProcess``."""

    def __init__(self, name: str, running: Any) -> None:
        """``running``: Ray's reference to the exit code."""
        self.name = name
        self._running = running

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait. Raise ProcessError if the process ends, or is not ready in time."""
        start = time.monotonic()
        while not is_ready():
            if not self.is_alive():
                raise ProcessError(f"{self.name} ended while it started: {self.why_ended()}")
            if time.monotonic() - start > START_SECONDS:
                raise ProcessError(f"{self.name} is not ready after {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def is_alive(self) -> bool:
        """Return whether the process is at work."""
        import ray

        done, _ = ray.wait([self._running], timeout=0)
        return not done

    def why_ended(self) -> str:
        """Return how the process ended."""
        import ray

        try:
            return f"exit code {ray.get(self._running, timeout=POLL_SECONDS)}"
        except Exception as error:  # whatever ended the process; this is a message
            lines = str(error).strip().splitlines()
            return lines[0] if lines else type(error).__name__

    def end_of_log(self) -> str:
        """Return where the process's output is."""
        return "its output is in Ray's logs (ray logs)"

    def end(self, patience: float = 0.0) -> None:
        """Wait for the process to end; the run ends its actor."""
        import ray

        with suppress(Exception):  # it may have ended in any way
            ray.wait([self._running], timeout=patience)
