"""The parent's side of :mod:`hacrl.tasks.gym.worker`."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import hacrl
from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.math.wire import receive, send
from hacrl.types import Verdict

_LONGEST_REPLY = 2**31  # bytes: all questions of a task come in one message
_START_LIMIT = 300.0  # seconds to import reasoning-gym, on a busy machine


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``entry`` is what the scorer needs, in tagged JSON."""

    question: str
    answer: str | None  # None: many answers are right, and reasoning-gym names none
    entry: Any


class Child:
    """A worker process with a pipe each way."""

    def __init__(self, job: str) -> None:
        # A plain command, not multiprocessing: that would import the user's script again.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hacrl.tasks.gym.worker", job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                env=_environment(),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its children
            )
        except OSError as error:
            raise TaskError(
                f"task: a process for reasoning-gym cannot start: {error}; check memory and process limits"
            ) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self.kill = weakref.finalize(self, _kill, self._process, self._complaints)

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; a child that is gone is noticed when it does not answer."""
        with contextlib.suppress(BrokenPipeError):
            send(self._requests.fileno(), message)

    def last_words(self) -> str:
        """What a child that died said last, usually its error; a guess if it said nothing."""
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "its process was ended, perhaps for want of memory"

    def receive(self, limit: float | None) -> dict[str, Any] | None:
        """Its answer, None if it died. Raises TimeoutError after ``limit`` seconds without one."""
        poll = select.poll()
        poll.register(self._replies.fileno(), select.POLLIN)
        if not poll.poll(None if limit is None else limit * 1000):
            raise TimeoutError
        return receive(self._replies.fileno(), longest=_LONGEST_REPLY)


def draw_questions(
    kind: str, config: Mapping[str, Any], seed: int, count: int, *, avoid: Sequence[str], answer: str
) -> tuple[list[Question], int]:
    """That many distinct questions, in a fixed shuffled order, and how many had to be drawn to get them."""
    if find_spec("reasoning_gym") is None:
        raise TaskError(f"task gym:{kind} needs reasoning-gym; install it with: pip install 'hacrl[gym]'")
    child = Child("questions")
    try:
        child.send(
            {
                "kind": kind,
                "config": dict(config),
                "seed": seed,
                "count": count,
                "avoid": list(avoid),
                "answer": answer,
            }
        )
        reply = child.receive(limit=None)  # some kinds take their time; Ctrl-C works
        why = "" if reply else child.last_words()
    finally:
        child.kill()
    if reply is None:
        raise TaskError(
            f"config: making questions of gym:{kind} with {dict(config)} failed: {why}; try other settings"
        )
    if "error" in reply:
        raise TaskError(reply["error"])
    return [Question(**entry) for entry in reply["questions"]], reply["draws"]


class GymScorer:
    """Scores answers in a child process, started with the first one and again after a kill."""

    def __init__(self, kind: str, config: Mapping[str, Any], seed: int, settings: VerifierSettings) -> None:
        memory = 0 if settings.memory_limit is None else int(settings.memory_limit * 2**30)
        self._setup = {
            "kind": kind,
            "config": dict(config),
            "seed": seed,
            "memory": memory,
            "time_limit": settings.time_limit,
        }
        self._time_limit = settings.time_limit
        self._child: Child | None = None

    def judge(self, answer: str, entry: Any) -> Verdict:
        """Correct for a score of 1 only. A scorer that raises or dies is a crash, one too slow a timeout."""
        child = self._child or self._start()
        child.send({"answer": answer, "entry": entry})
        try:
            reply = child.receive(self._time_limit)
        except TimeoutError:
            self.close()
            return Verdict(0.0, "timeout")
        except BaseException:  # interrupted: a late answer would be taken for that to another question
            self.close()
            raise
        if reply is None:
            self.close()
            return Verdict(0.0, "crash")
        return Verdict(1.0 if reply["label"] == "correct" else 0.0, reply["label"])

    def close(self) -> None:
        """End the child; a later :meth:`judge` starts a new one."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _start(self) -> Child:
        child = Child("scores")
        child.send(self._setup)
        try:
            started = child.receive(_START_LIMIT)
        except TimeoutError:
            started = None
        if started is None:
            child.kill()
            raise TaskError(f"the process that scores gym:{self._setup['kind']} does not start; check memory")
        self._child = child
        return child


def _environment() -> dict[str, str]:
    root = str(Path(hacrl.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, inherited] if inherited else [root]),
        "PYTHONHASHSEED": "0",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _kill(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> None:
    process.kill()
    process.wait()
    for file in (process.stdin, process.stdout, complaints):
        if file is not None:
            file.close()
