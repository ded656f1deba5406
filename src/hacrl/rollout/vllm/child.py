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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hacrl.rollout.vllm import child_program
from hacrl.rollout.vllm.backend import Ask, EngineError, EngineLostError, Said, sampling_fields
from hacrl.rollout.vllm.process import OwnProcess

WORKER = "hacrl.rollout.vllm.in_vllm.hacrl_vllm_worker.WeightReceiver"
END_SECONDS = 10.0  # in which it ends by itself
Answer = dict[str, Any]


class ChildBackend:
    """``vllm.LLM`` at the other end of a socket; what is said there is JSON, a line each."""

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
        self._engine_args = dict(engine_args)
        here = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # it finds what we find
        command = [sys.executable, "-P", "-m", child_program.__name__]
        self._process = OwnProcess(self.name, command, here, log, start_timeout)
        self._line: _Line | None = None

    def start(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self.close()
        ours, theirs = socket.socketpair()
        line = self._line = _Line(ours)
        line.send({"engine_args": self._engine_args, "worker": WORKER})
        try:
            with theirs:
                self._process.start(line.has_answer, inherits=theirs.fileno())
            answer = line.receive()
            if answer is None:
                raise EngineError(f"{self.name} does not start; {self._process.log_end()}")
            if "error" in answer:
                raise EngineError(f"{self.name} does not start: {answer['error']}")
        except BaseException:
            self.close()
            raise

    def generate(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Said]]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        asked = [[list(ask.prompt_ids), sampling_fields(ask)] for ask in asks]
        self._send({"do": "generate", "asks": asked})
        is_done = False
        try:
            while "at" in (answer := self._receive("generating")):
                yield answer["at"], Said(tuple(answer["ids"]), tuple(answer["logprobs"]))
            is_done = True
        except EngineError:
            is_done = True
            raise
        finally:
            if not is_done:  # whoever takes responses has left
                with suppress(EngineError):
                    self._send({"do": "leave"})
                    while "at" in self._receive("stopping"):
                        pass

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        results: list[Any] = self._ask(method, {"do": "call", "method": method, "arguments": arguments})
        return results

    def forget_prefixes(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self._ask("resetting its prefix cache", {"do": "forget_prefixes"})

    def sleep(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self._ask("going to sleep", {"do": "sleep"})

    def wake(self, part: str) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self._ask(f"waking up ({part})", {"do": "wake", "part": part})

    def close(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
        self._process.end(patience=END_SECONDS)  # by itself: nobody is there any more

    def _ask(self, doing: str, request: Answer) -> Any:
        self._send(request)
        return self._receive(doing)["done"]

    def _send(self, request: Answer) -> None:
        if self._line is None:
            raise EngineLostError(f"{self.name} is not running.")
        with suppress(OSError):  # its end is noticed when it does not answer
            self._line.send(request)

    def _receive(self, doing: str) -> Answer:
        """The next thing it says; errors get the engine's name, and a dead engine is told from a failure."""
        line = self._line
        answer = None if line is None else line.receive()
        if answer is None:
            raise EngineLostError(f"{self.name} died while {doing}: its process is gone.")
        if answer.get("lost"):
            raise EngineLostError(f"{self.name} died while {doing}: {answer['error']}.")
        if "error" in answer:
            raise EngineError(f"{self.name} failed while {doing}: {answer['error']}")
        return answer


class _Line:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")

    def send(self, request: Answer) -> None:
        self._socket.sendall(json.dumps(request).encode() + b"\n")

    def has_answer(self) -> bool:
        """Whether something has been said, or never will be."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def receive(self) -> Answer | None:
        """Wait for it; None: the other end is gone."""
        try:
            said = self._file.readline()
        except (OSError, ValueError):  # it was closed by another thread
            return None
        answer: Answer | None = json.loads(said) if said.endswith(b"\n") else None
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever waits for an answer wakes up
        self._file.close()
        self._socket.close()
