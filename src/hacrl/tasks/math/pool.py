r"""Judge maths answers: plain ones here, the others in worker processes that can be killed.

A response is untrusted text. ``\boxed{9^{9^{9^9}}}`` keeps sympy busy for ever, other texts eat all memory or
crash the interpreter; math-verify's own time limit works in a main thread only. So every symbolic comparison
runs in a process with a hard limit, and whatever happens there costs one verdict and no more.
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
from hacrl.tasks.math.boxes import extract_answer
from hacrl.tasks.math.matching import Undecided, answers_match, is_readable, undecided
from hacrl.tasks.math.process import START_LIMIT, Pair, Worker
from hacrl.types import Verdict, VerdictLabel

REMEMBERED = 50_000  # pairs judged by workers, over all calls
FAILED_STARTS = 3  # in a row, before it is an error


class MathVerifier:
    """Rewards 1 for a response whose last box holds the gold answer, else 0. Any thread may call it."""

    def __init__(self, settings: VerifierSettings | None = None) -> None:
        self.settings = settings or VerifierSettings()
        self._workers: list[Worker] = []
        self._known: OrderedDict[Pair, VerdictLabel] = OrderedDict()
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, self._owner)

    def verify(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Judge (gold answer, response) pairs, one verdict each, in order. No text makes this raise."""
        with self._lock:
            self._forget_workers_of_a_parent()
            labels: list[VerdictLabel | None] = []
            asked: list[Pair] = []
            judged: dict[Pair, VerdictLabel] = {}
            for gold, response in pairs:
                label, pair = judge_plainly(gold, response)
                labels.append(label)
                asked.append(pair)
                if label is None and pair in self._known:
                    judged[pair] = self._known[pair]
            waiting = [
                pair
                for pair, label in dict(zip(asked, labels, strict=True)).items()
                if label is None and pair not in judged
            ]
            judged |= self._judge_in_workers(waiting)
            for pair in waiting:
                if judged[pair] in ("correct", "wrong"):  # a timeout may have been the machine's fault
                    self._known[pair] = judged[pair]
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        final = [label or judged[pair] for label, pair in zip(labels, asked, strict=True)]
        return [Verdict(1.0 if label == "correct" else 0.0, label) for label in final]

    def close(self) -> None:
        """End the workers. A later call starts new ones."""
        with self._lock:
            self._forget_workers_of_a_parent()
            _kill_all(self._workers, self._owner)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def worker_pids(self) -> list[int]:
        """The process ids of the workers there are now."""
        return [worker.process.pid for worker in self._workers]

    def _forget_workers_of_a_parent(self) -> None:
        """After a fork the workers are the other process's: leave them alone."""
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
                self._hand_out(waiting)
                for worker in self._wait():
                    if not worker.is_ready:
                        failed_starts = self._note_start(worker, failed_starts)
                    elif (pair := worker.pair) is not None:
                        judged[pair] = self._note_reply(worker)
        finally:
            # Interrupted: what a busy worker says later would be taken for the answer to another question.
            for worker in [w for w in self._workers if w.pair is not None]:
                self._drop(worker)
        return judged

    def _hand_out(self, waiting: deque[Pair]) -> None:
        """Give idle workers a pair each, and start as many workers as there is work for."""
        for worker in [w for w in self._workers if w.is_idle]:
            if waiting and worker.ask(waiting[0], self.settings.time_limit):
                waiting.popleft()
            elif waiting:
                self._drop(worker)  # died while idle
        starting = sum(not w.is_ready for w in self._workers)
        while len(self._workers) < self.settings.worker_count and starting < len(waiting):
            self._workers.append(Worker(self.settings))
            starting += 1

    def _wait(self) -> list[Worker]:
        """The workers that have something to say, or have used up their time."""
        active = [w for w in self._workers if not w.is_idle]
        poll = select.poll()  # select.select fails beyond file descriptor 1023
        for worker in active:
            poll.register(worker.process.reply_fd, select.POLLIN)
        patience = min(w.deadline for w in active) - time.monotonic()
        heard = {fd for fd, _ in poll.poll(max(0.0, patience) * 1000 + 1)}
        now = time.monotonic()
        return [w for w in active if w.process.reply_fd in heard or w.deadline <= now]

    def _note_start(self, worker: Worker, failed: int) -> int:
        """A worker has started, or has failed to; how many in a row have failed."""
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
        if failed + 1 >= FAILED_STARTS:
            raise TaskError(
                f"verification workers end while starting (exit code {worker.process.exit_code}); "
                "to see why: python -m hacrl.tasks.math.worker 5 0"
            )
        return failed + 1

    def _note_reply(self, worker: Worker) -> VerdictLabel:
        """The verdict on the worker's pair. A worker that died or took too long is replaced later."""
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


def judge_plainly(gold: str, response: str) -> tuple[VerdictLabel | None, Pair]:
    """The verdict as far as text decides it, else None; and the pair that would have to be compared."""
    answer = extract_answer(response)
    if answer is None:
        return "unparsable", (gold, "")
    try:
        if answers_match(gold, answer, undecided):
            return "correct", (gold, answer)
    except Undecided:
        return None, (gold, answer)
    return ("wrong" if is_readable(answer) else "unparsable"), (gold, answer)


def _kill_all(workers: list[Worker], owner: int) -> None:
    """For close, the garbage collector and the interpreter's exit."""
    while workers and os.getpid() == owner:
        workers.pop().kill()
