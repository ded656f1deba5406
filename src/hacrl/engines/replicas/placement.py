"""Where replicas run: as child processes on this machine, or where an executor places them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from hacrl.processes import SupervisedProcess, python_command, python_environment

PROGRAM = "hacrl.engines.replicas.program"
VARIABLE = "HACRL_REPLICA"  # in the environment of the program: its arguments
START_SECONDS = 300.0  # until a replica has imported torch and has connected
END_SECONDS = 5.0  # from the end of the connection until a replica is terminated
LOCALHOST = "127.0.0.1"


class ReplicaProcess(Protocol):
    """A process that runs :func:`hacrl.engines.replicas.program.main`."""

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        ...

    def why_ended(self) -> str:
        """Return how the process ended and what it wrote last, for messages."""
        ...

    def end(self, patience: float = 0.0) -> None:
        """End the process: wait ``patience`` seconds, then kill it. May be called more than once."""
        ...


class ReplicaPlacement(Protocol):
    """Starts replicas."""

    host: str  # where replicas reach this process
    replaces_agent: bool  # whether an agent that has lost all replicas is placed anew, with all its processes

    def start(self, name: str, number: int, arguments: dict[str, Any]) -> ReplicaProcess:
        """Start a process that calls ``program.main(arguments)``, and return it without waiting.

        ``name`` is the replica's in messages, ``arguments["device"]`` where it computes.
        """
        ...


class LocalPlacement:
    """Child processes on this machine. ``folder`` takes their logs."""

    host = LOCALHOST
    replaces_agent = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self, name: str, number: int, arguments: dict[str, Any]) -> ReplicaProcess:
        """Start a child process. Its arguments are in its environment, which other users cannot read."""
        process = SupervisedProcess(
            name,
            python_command(PROGRAM),
            {**python_environment(), VARIABLE: json.dumps(arguments)},
            self._folder / f"replica-{number}.log",
            START_SECONDS,
        )
        process.launch()
        return _Child(process)


class _Child:
    def __init__(self, process: SupervisedProcess) -> None:
        self._process = process
        self._why_ended: str | None = None

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def why_ended(self) -> str:
        return self._why_ended or f"{self._process.why_ended()}; {self._process.end_of_log()}"

    def end(self, patience: float = 0.0) -> None:
        if self._process.pid is not None:
            if not self._process.is_alive():
                self._why_ended = self.why_ended()
            self._process.end(patience)
