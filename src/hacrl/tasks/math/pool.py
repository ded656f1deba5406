r"""Verify maths answers: by text in this process, by computer algebra in worker processes.

A response is untrusted text. ``\boxed{9^{9^{9^9}}}`` keeps sympy busy forever, and other texts exhaust the
memory or crash the interpreter. math-verify's own time limit works in the main thread only. Therefore every
symbolic comparison runs in a process with hard limits; a failure there costs one verdict.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import TracebackType

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.tasks.math.extraction import extract_answer
from hacrl.tasks.math.matching import NeedsAlgebra, answers_match, defer_to_worker, parse_answer
from hacrl.tasks.math.process import START_LIMIT, Pair, Worker
from hacrl.types import Verdict, VerdictLabel

CACHED_PAIRS = 50_000  # verdicts of workers, over all calls
MAX_FAILED_STARTS = 3  # in a row


class MathVerifier:
    """Gives reward 1 if a response's last box equals the gold answer, else 0. Thread-safe."""

    def __init__(self, settings: VerifierSettings | None = None) -> None:
        self.settings = settings or VerifierSettings()
        self._workers: list[Worker] = []
        self._cache: OrderedDict[Pair, VerdictLabel] = OrderedDict()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, self._owner)

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Return one verdict per (gold answer, response) pair, in order. No text makes this raise."""
        with self._lock:
            self._forget_workers_of_parent()
            labels: list[VerdictLabel | None] = []
            compared: list[Pair] = []
            judged: dict[Pair, VerdictLabel] = {}
            for gold, response in pairs:
                label, pair = judge_by_text(gold, response)
                labels.append(label)
                compared.append(pair)
                if label is None and pair in self._cache:
                    judged[pair] = self._cache[pair]
            waiting = [
                pair
                for pair, label in dict(zip(compared, labels, strict=True)).items()
                if label is None and pair not in judged
            ]
            judged |= self._judge_in_workers(waiting)
            for pair in waiting:
                if judged[pair] in ("correct", "wrong"):  # a busy machine may have caused a timeout
                    self._cache[pair] = judged[pair]
            while len(self._cache) > CACHED_PAIRS:
                self._cache.popitem(last=False)
        final = [label or judged[pair] for label, pair in zip(labels, compared, strict=True)]
        return [Verdict(1.0 if label == "correct" else 0.0, label) for label in final]

    def close(self) -> None:
        """End the workers. A later call to :meth:`verify` starts new ones."""
        with self._lock:
            self._forget_workers_of_parent()
            _kill_all(self._workers, self._owner)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def worker_pids(self) -> list[int]:
        """Return the process ids of the current workers."""
        return [worker.process.pid for worker in self._workers]

    def _forget_workers_of_parent(self) -> None:
        """After a fork, drop the workers without killing them: they belong to the parent process."""
        if os.getpid() != self._owner:
            self._finalizer.detach()
            self._workers, self._owner = [], os.getpid()
            self._finalizer = weakref.finalize(self, _kill_all, self._workers, self._owner)

    def _judge_in_workers(self, pairs: Sequence[Pair]) -> dict[Pair, VerdictLabel]:
        waiting = deque(pairs)
        judged: dict[Pair, VerdictLabel] = {}
        failed_starts = 0
        try:
            while len(judged) < len(pairs):
                self._assign(waiting)
                for worker in self._wait():
                    if not worker.is_ready:
                        failed_starts = self._finish_start(worker, failed_starts)
                    elif (pair := worker.pair) is not None:
                        judged[pair] = self._finish_pair(worker)
        finally:
            # After an interrupt, a busy worker's late reply would be read as the reply to a later pair.
            for worker in [w for w in self._workers if w.pair is not None]:
                self._drop(worker)
        return judged

    def _assign(self, waiting: deque[Pair]) -> None:
        """Give each idle worker a pair, and start as many workers as there are pairs left."""
        for worker in [w for w in self._workers if w.is_idle]:
            if waiting and worker.ask(waiting[0], self.settings.time_limit):
                waiting.popleft()
            elif waiting:
                self._drop(worker)  # it died while idle
        starting = sum(not w.is_ready for w in self._workers)
        while len(self._workers) < self.settings.worker_count and starting < len(waiting):
            self._workers.append(Worker(self.settings))
            starting += 1

    def _wait(self) -> list[Worker]:
        """Wait until a worker has replied or reached its deadline; return those workers."""
        active = [w for w in self._workers if not w.is_idle]
        poll = select.poll()  # select.select fails beyond file descriptor 1023
        for worker in active:
            poll.register(worker.process.reply_fd, select.POLLIN)
        remaining = min(w.deadline for w in active) - time.monotonic()
        readable = {fd for fd, _ in poll.poll(max(0.0, remaining) * 1000 + 1)}
        now = time.monotonic()
        return [w for w in active if w.process.reply_fd in readable or w.deadline <= now]

    def _finish_start(self, worker: Worker, failed: int) -> int:
        """Record that a worker started or failed to; return how many starts in a row have failed."""
        if worker.deadline <= time.monotonic():
            self._drop(worker)
            raise TaskError(
                f"a verification worker did not start within {START_LIMIT:.0f} s: is the machine overloaded?"
            )
        try:
            if worker.take_ready():
                return 0
        except TaskError:
            self._drop(worker)
            raise
        self._drop(worker)
        if failed + 1 >= MAX_FAILED_STARTS:
            raise TaskError(
                f"verification workers end while starting (exit code {worker.process.exit_code}); "
                "to see why: python -m hacrl.tasks.math.worker 5 0"
            )
        return failed + 1

    def _finish_pair(self, worker: Worker) -> VerdictLabel:
        """Return the verdict on the worker's pair. Drop a worker that died or took too long."""
        if not worker.process.has_reply():
            self._drop(worker)
            return "timeout"
        equal = worker.take_reply()
        if equal is None:
            self._drop(worker)
            return "timeout" if worker.ran_out_of_time() else "crash"
        return "correct" if equal else "wrong"

    def _drop(self, worker: Worker) -> None:
        self._workers.remove(worker)
        worker.kill()


def judge_by_text(gold: str, response: str) -> tuple[VerdictLabel | None, Pair]:
    """Return the verdict if text decides it, else None; and the pair of gold answer and box content.

    An error of the text comparison is a bug, but a response must not end a run: its verdict is ``crash``.
    """
    answer = extract_answer(response)
    if answer is None:
        return "unparsable", (gold, "")
    try:
        if answers_match(gold, answer, defer_to_worker):
            return "correct", (gold, answer)
        return ("unparsable" if parse_answer(answer) is None else "wrong"), (gold, answer)
    except NeedsAlgebra:
        return None, (gold, answer)
    except Exception:  # untrusted text: counted as a crash, never silently as wrong
        return "crash", (gold, answer)


def _kill_all(workers: list[Worker], owner: int) -> None:
    """Kill the workers; called on close, by the garbage collector and when the interpreter exits."""
    while workers and os.getpid() == owner:
        workers.pop().kill()
