"""The parent's side of :mod:`hacrl.tasks.gym.worker`: ask for questions, and for verdicts on answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.processes import MessageProcess, python_command, python_environment
from hacrl.types import Verdict

_LONGEST_REPLY = 2**31  # bytes: all questions of a task come in one message
_START_LIMIT = 300.0  # seconds to import reasoning-gym, on a busy machine


@dataclass(frozen=True, slots=True)
class Question:
    """One question; ``entry`` is what the scorer needs, in tagged JSON."""

    question: str
    answer: str | None  # None: many answers are right, and reasoning-gym names none
    entry: Any


def draw_questions(
    kind: str, config: Mapping[str, Any], seed: int, count: int, *, avoid: Sequence[str], answer: str
) -> tuple[list[Question], int]:
    """Return ``count`` distinct questions in a fixed shuffled order, and how many were drawn to get them."""
    if find_spec("reasoning_gym") is None:
        raise TaskError(f"task gym:{kind} needs reasoning-gym; install it with: pip install 'hacrl[gym]'")
    child = _start_worker("questions")
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
        reply = child.receive(_LONGEST_REPLY)  # no time limit, some kinds are slow; Ctrl-C works
        why = child.last_error() or "its process was ended, perhaps for want of memory"
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
    """Scores answers in a child process, which starts with the first answer and again after a kill."""

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
        self._child: MessageProcess | None = None

    def judge(self, answer: str, entry: Any) -> Verdict:
        """Return the verdict: correct for a score of 1 only.

        A scorer that raises or dies counts as a crash, one that is too slow as a timeout.
        """
        child = self._child or self._start()
        child.send({"answer": answer, "entry": entry})  # a scorer that has died sends no reply
        try:
            if not child.has_reply(self._time_limit):
                self.close()
                return Verdict(0.0, "timeout")
            reply = child.receive()
        except BaseException:  # interrupted: a late reply would be taken for that to another answer
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

    def _start(self) -> MessageProcess:
        child = _start_worker("scores")
        child.send(self._setup)
        if not child.has_reply(_START_LIMIT) or child.receive() is None:
            child.kill()
            raise TaskError(f"the process that scores gym:{self._setup['kind']} does not start; check memory")
        self._child = child
        return child


def _start_worker(job: str) -> MessageProcess:
    environment = python_environment(
        PYTHONHASHSEED="0", PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"
    )
    try:
        return MessageProcess(python_command("hacrl.tasks.gym.worker", job), environment, keeps_errors=True)
    except OSError as error:
        raise TaskError(
            f"task: a process for reasoning-gym cannot start: {error}; check memory and process limits"
        ) from error
