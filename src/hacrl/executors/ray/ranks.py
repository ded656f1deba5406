"""The other ranks of a sharded agent, as Ray actors on this or other machines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hacrl.executors.rank_processes import LIBRARY_NETWORK, LOOPBACK, START_SECONDS
from hacrl.processes import POLL_SECONDS, ProcessError


class RankActor:
    """One rank. Ray runs this class in a process with the rank's share of a GPU."""

    def run(self, arguments: dict[str, Any], is_on_one_host: bool) -> int:
        """Follow rank 0 to the end; return the exit code."""
        from hacrl.executors.rank_program import main

        if is_on_one_host:
            os.environ.setdefault(LIBRARY_NETWORK, LOOPBACK)
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
        return "cuda:0" if first.startswith("cuda") else first

    def launch(self, agent: str, rank: int, arguments: dict[str, Any]) -> ActorProcess:
        """Start a rank."""
        running = self._actors[agent, rank].run.remote(arguments, self._is_on_one_host)
        return ActorProcess(f"rank {rank} of agent {agent!r}", running)

    def close(self) -> None:
        """Do nothing: the actors are the run's."""


class ActorProcess:
    """One rank at work in its actor. Implements ``RankProcess``."""

    def __init__(self, name: str, running: Any) -> None:
        """``running``: Ray's reference to the rank's exit code."""
        self.name = name
        self._running = running

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        """Wait. Raise ProcessError if the rank ends, or is not ready in time."""
        start = time.monotonic()
        while not is_ready():
            if not self.is_alive():
                raise ProcessError(f"{self.name} ended while it started: {self.why_ended()}")
            if time.monotonic() - start > START_SECONDS:
                raise ProcessError(f"{self.name} is not ready after {START_SECONDS:g} s")
            time.sleep(POLL_SECONDS)

    def is_alive(self) -> bool:
        """Return whether the rank is at work."""
        import ray

        done, _ = ray.wait([self._running], timeout=0)
        return not done

    def why_ended(self) -> str:
        """Return how the rank ended."""
        import ray

        try:
            return f"exit code {ray.get(self._running, timeout=POLL_SECONDS)}"
        except Exception as error:  # whatever ended the rank; this is a message
            lines = str(error).strip().splitlines()
            return lines[0] if lines else type(error).__name__

    def end_of_log(self) -> str:
        """Return where the rank's output is."""
        return "its output is in Ray's logs (ray logs)"

    def end(self, grace: float) -> None:
        """Wait for the rank to end; the run ends its actor."""
        import ray

        with suppress(Exception):  # it may have ended in any way
            ray.wait([self._running], timeout=grace)
