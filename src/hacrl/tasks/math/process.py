"""One verification worker as the pool sees it: started, ready, busy with one pair, killed."""

from __future__ import annotations

import signal
import time

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.processes import MessageProcess, python_command, python_environment

WALL_TIME_FACTOR = 10.0  # times the limit on CPU time: other processes may have the CPU
START_LIMIT = 300.0  # seconds; imports can be slow on a busy or networked disk

Pair = tuple[str, str]  # gold answer, content of the answer's box


class Worker:
    """A child process that compares one pair at a time. Not safe for several threads at once."""

    def __init__(self, settings: VerifierSettings) -> None:
        memory = 0 if settings.memory_limit is None else int(settings.memory_limit * 2**30)
        command = python_command("hacrl.tasks.math.worker", str(settings.time_limit), str(memory))
        try:
            self.process = MessageProcess(command, _environment())
        except OSError as error:
            raise TaskError(
                f"cannot start a verification worker ({error}): check memory and process limits"
            ) from error
        self.is_ready = False
        self.pair: Pair | None = None
        self.deadline = time.monotonic() + START_LIMIT

    @property
    def is_idle(self) -> bool:
        """Whether the worker can take a pair."""
        return self.is_ready and self.pair is None

    def ask(self, pair: Pair, time_limit: float) -> bool:
        """Hand over a pair and start its clock. Return False if the process has ended while idle."""
        if not self.process.send({"gold": pair[0], "answer": pair[1]}):
            return False
        self.pair, self.deadline = pair, time.monotonic() + WALL_TIME_FACTOR * time_limit
        return True

    def take_reply(self) -> bool | None:
        """Return the verdict on the worker's pair, which it then no longer has; None if it has died."""
        message = self.process.receive()
        self.pair = None
        return None if message is None else bool(message["equal"])

    def take_ready(self) -> bool:
        """Note that the worker has started. Return False if it died; raise TaskError if it says why."""
        message = self.process.receive()
        if message is not None and "error" in message:
            raise TaskError(
                f"a verification worker cannot start: {message['error']}. "
                "Repair it with: pip install 'math-verify[antlr4_13_2]'"
            )
        self.is_ready = message is not None
        return self.is_ready

    def ran_out_of_time(self) -> bool:
        """Return whether the kernel ended the process, which is gone, for having used up its CPU time."""
        return self.process.exit_code == -signal.SIGPROF

    def kill(self) -> None:
        """End the process at once and leave nothing behind. May be called more than once."""
        self.process.kill()


def _environment() -> dict[str, str]:
    return python_environment(
        PYTHONHASHSEED="0",  # sympy's order of terms follows it: equal pairs, equal work
        PYTHONWARNINGS="ignore",
        OMP_NUM_THREADS="1",
    )
