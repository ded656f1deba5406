"""One worker process as the pool sees it: started, ready, busy with one pair, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hacrl
from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.math.wire import receive, send

PATIENCE = 10.0  # times the time limit by the clock: other processes may have the CPU
START_LIMIT = 300.0  # seconds; imports can be slow on a busy or networked disk

Pair = tuple[str, str]  # gold answer, content of the answer's box


class Worker:
    """A child process with a pipe each way. Not safe for several threads at once."""

    def __init__(self, settings: VerifierSettings) -> None:
        memory = 0 if settings.memory_limit is None else int(settings.memory_limit * 2**30)
        # A plain command, not multiprocessing, whose children would import the user's script again.
        # -P: no module of the working directory may stand in for one of ours.
        command = [sys.executable, "-P", "-m", "hacrl.tasks.math.worker"]
        try:
            self.process = subprocess.Popen(
                [*command, str(settings.time_limit), str(memory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the parent, which then closes its workers
            )
        except OSError as error:
            raise TaskError(
                f"cannot start a verification worker ({error}): check memory and process limits"
            ) from error
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.is_ready = False
        self.pair: Pair | None = None
        self.deadline = time.monotonic() + START_LIMIT

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a pair."""
        return self.is_ready and self.pair is None

    def ask(self, pair: Pair, time_limit: float) -> bool:
        """Hand over a pair and start its clock. False if the process has gone while it was idle."""
        if self.process.poll() is not None:
            return False
        try:
            send(self._requests, {"gold": pair[0], "answer": pair[1]})
        except BrokenPipeError:
            return False
        self.pair, self.deadline = pair, time.monotonic() + PATIENCE * time_limit
        return True

    def take_reply(self) -> bool | None:
        """The verdict on the pair it had, which it then no longer has; None if the process has died."""
        message = receive(self.replies)
        self.pair = None
        return None if message is None else bool(message["equal"])

    def take_ready(self) -> bool:
        """Note that it has started. False if it died before; TaskError if it says why it cannot start."""
        message = receive(self.replies)
        if message is not None and "error" in message:
            raise TaskError(
                f"a verification worker cannot start: {message['error']}. "
                "Repair it with: pip install 'math-verify[antlr4_13_2]'"
            )
        self.is_ready = message is not None
        return self.is_ready

    def ran_out_of_time(self) -> bool:
        """Whether the process, which is no more, was ended for having used up its CPU time."""
        return self.process.returncode == -signal.SIGPROF

    def kill(self) -> None:
        """End it at once and leave nothing behind. May be called more than once."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def _environment() -> dict[str, str]:
    root = str(Path(hacrl.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        "PYTHONHASHSEED": "0",  # sympy's order of terms follows it: equal pairs, equal work
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
