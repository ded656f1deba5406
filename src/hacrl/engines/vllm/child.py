"""vLLM of hacrl's own environment, in a process of its own.

vLLM's bookkeeping for every token takes about as much of a core as its computing takes of a small model's
GPU. In hacrl's process, engines that answer side by side would wait for each other, and for the learner.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from hacrl.engines.vllm import child_program
from hacrl.engines.vllm.backend import (
    Ask,
    Ended,
    EngineError,
    EngineLostError,
    Said,
    process_errors_as_engine_errors,
    sampling_fields,
)
from hacrl.engines.vllm.numbers_as_text import floats_from_text, integers_from_text
from hacrl.processes import SupervisedProcess

WORKER = "hacrl.engines.vllm.in_vllm.hacrl_vllm_worker.WeightReceiver"
END_SECONDS = 10.0  # in which it ends by itself
Answer = dict[str, Any]


class ChildBackend:
    """``vllm.LLM`` at the other end of a socket; what is said there is JSON, a line each.

    Requests are numbered and so are their answers: who leaves a request, e.g. by Ctrl-C, leaves answers
    behind, and those must not be taken for the next one's.
    """

    def __init__(
        self,
        name: str,
        engine_args: Mapping[str, Any],
        environment: Mapping[str, str],
        can_sleep: bool,
        log: Path,
        start_timeout: float,
    ) -> None:
        self.name = f"vLLM engine of agent {name!r}"
        self.can_sleep = can_sleep
        self._engine = {"engine_args": dict(engine_args), "worker": WORKER}
        self._asked = 0
        here = {**environment, "PYTHONPATH": os.pathsep.join(_import_path())}
        command = [sys.executable, "-P", "-m", child_program.__name__]
        self._process = SupervisedProcess(self.name, command, here, log, start_timeout)
        self._line: _Line | None = None
        self._is_launched = False  # and not started yet

    def launch(self) -> None:
        """Start the process: it imports vLLM, then waits for :meth:`start`, and takes no memory of a GPU."""
        self.close()
        ours, theirs = socket.socketpair()
        self._line = _Line(ours)
        try:
            with theirs:
                self._process.launch(inherited_fd=theirs.fileno())
        except BaseException:
            self._end(patience=0.0)
            raise
        self._is_launched = True

    def start(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        if not self._is_launched:
            self.launch()
        line, self._is_launched = self._line, False
        if line is None:
            raise EngineLostError(f"{self.name} was ended before it was ready.")
        try:
            line.send_beside(self._engine)
            with process_errors_as_engine_errors():
                self._process.wait_until_ready(line.has_answer)
            answer = line.receive()
        except BaseException:
            self._end(patience=0.0)
            raise
        if answer is None or "error" in answer:
            why = self._process.why_ended() if answer is None else answer["error"]
            self._end(patience=END_SECONDS)  # what went wrong is written before it ends
            raise EngineError(f"{self.name} does not start: {why}; {self._process.end_of_log()}")

    def generate(self, asks: Sequence[Ask]) -> Iterator[Ended]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        number = self._send({"do": "generate", "asks": _grouped(asks)})
        left = len(asks)
        try:
            while "ended" in (answer := self._receive(number, "generating")):
                left -= len(answer["ended"])
                yield [
                    (at, Said(integers_from_text(ids), floats_from_text(logprobs)))
                    for at, ids, logprobs in answer["ended"]
                ]
        finally:
            if left:  # whoever takes responses has left
                with suppress(EngineError):
                    self._send({"do": "leave"})
        if left:
            raise EngineError(f"{self.name} left {left} of {len(asks)} requests without an answer")

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        results: list[Any] = self._ask(method, {"do": "call", "method": method, "arguments": arguments})
        return results

    def forget_prefixes(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._ask("resetting its prefix cache", {"do": "forget_prefixes"})

    def sleep(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._ask("going to sleep", {"do": "sleep"})

    def wake(self, part: str) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._ask(f"waking up ({part})", {"do": "wake", "part": part})

    def close(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._end(patience=0.0 if self._is_launched else END_SECONDS)  # an import has nothing to tidy up

    def _end(self, patience: float) -> None:
        line, self._line, self._is_launched = self._line, None, False
        if line is not None:
            line.close()  # nobody is there any more: it ends by itself
        self._process.end(patience)

    def _ask(self, doing: str, request: Answer) -> Any:
        return self._receive(self._send(request), doing)["done"]

    def _send(self, request: Answer) -> int:
        """Its number."""
        line = self._line
        if line is None:
            raise EngineLostError(f"{self.name} is not running.")
        self._asked += 1
        with suppress(OSError):  # its end is noticed when it does not answer
            line.send({**request, "number": self._asked})
        return self._asked

    def _receive(self, number: int, doing: str) -> Answer:
        """The next answer to that request; a dead engine is told from one that has failed."""
        line = self._line
        while (answer := None if line is None else line.receive()) is not None:
            if answer["number"] == number:
                break
        else:
            why = f"{self._process.why_ended()}, its log is {self._process.log}"
            raise EngineLostError(f"{self.name} died while {doing}: {why}.")
        if answer.get("lost"):
            raise EngineLostError(f"{self.name} died while {doing}: {answer['error']}.")
        if "error" in answer:
            raise EngineError(f"{self.name} failed while {doing}: {answer['error']}")
        return answer


class _Line:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._read = bytearray()  # what has come of lines that were not asked for yet

    def send(self, request: Answer) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def send_beside(self, request: Answer) -> None:
        """To a process that is yet to be started: as long as nobody reads, sending may wait."""

        def send() -> None:
            with suppress(OSError):
                self.send(request)

        threading.Thread(target=send, name="hacrl-vllm", daemon=True).start()

    def has_answer(self) -> bool:
        """Whether something has been said, or never will be."""
        looking = select.poll()
        try:
            looking.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # it was closed by another thread
            return True
        return bool(self._read or looking.poll(0))

    def receive(self) -> Answer | None:
        """Wait for the next answer; None: the other end is gone, or talks nonsense."""
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            try:
                come = self._socket.recv(2**20)
            except OSError:  # it was closed by another thread
                return None
            if not come:
                return None
            self._read += come
        said, self._read = bytes(self._read[:end]), self._read[end + 1 :]
        try:
            answer: Answer = json.loads(said)
        except ValueError:
            return None
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer wakes up
        self._socket.close()


def _grouped(asks: Sequence[Ask]) -> list[Any]:
    """Prompt and parameters of each, with a list of seeds: one for every response that is asked for."""
    return [
        [group[0].prompt_ids, sampling_fields(group[0]), [ask.seed for ask in group]]
        for group in (list(same) for _, same in groupby(asks, _all_but_the_seed))
    ]


def _all_but_the_seed(ask: Ask) -> tuple[Any, ...]:
    return ask.prompt_ids, ask.sampling, ask.stop_ids


def _import_path() -> list[str]:
    """The child finds what we find; nothing stands for the current folder."""
    return [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
