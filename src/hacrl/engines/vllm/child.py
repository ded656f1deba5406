"""The backend for vLLM of hacrl's own environment, in a child process.

vLLM spends about as much CPU time on each token as a small model spends GPU time. In hacrl's own process,
engines that generate concurrently would wait for each other and for the learner.
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

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import Sample
from hacrl.engines.numbers_as_text import floats_from_text, integers_from_text
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import child_program
from hacrl.engines.vllm.backend import (
    EngineLostError,
    IndexedSamples,
    Request,
    process_errors_as_engine_errors,
    sampling_fields,
)
from hacrl.processes import SupervisedProcess, python_command

WORKER = "hacrl.engines.vllm.in_vllm.hacrl_vllm_worker.WeightReceiver"
EXIT_SECONDS = 10.0  # for the process to end by itself
GENERATING = "generating"  # in messages
RPC_SECONDS = 1800.0  # for what is no generation: loading the weights of a large model
Message = dict[str, Any]


class ChildBackend:
    """``vllm.LLM`` at the other end of a socket; messages are lines of JSON.

    Requests and their replies are numbered. A caller that is interrupted, e.g. by Ctrl-C, leaves replies
    behind; numbers keep the next caller from taking them for its own. ``reads_text``: the engine loads the
    agent's tokenizer, for requests with stop strings.
    """

    def __init__(
        self,
        name: str,
        engine_args: Mapping[str, Any],
        environment: Mapping[str, str],
        can_sleep: bool,
        log: Path,
        start_timeout: float,
        reads_text: bool = False,
        timeout: float = VllmSettings.timeout,
    ) -> None:
        self.name = name
        self.can_sleep = can_sleep
        self._engine = {"engine_args": dict(engine_args), "worker": WORKER, "reads_text": reads_text}
        self._timeout = timeout
        self._last_number = 0
        variables = {**environment, "PYTHONPATH": os.pathsep.join(_import_path())}
        command = python_command(child_program.__name__)
        self._process = SupervisedProcess(self.name, command, variables, log, start_timeout)
        self._connection: _Connection | None = None
        self._is_launched = False  # and not started yet

    def launch(self) -> None:
        """Start the process, which imports vLLM and waits for :meth:`start`. It takes no GPU memory yet."""
        self.close()
        ours, theirs = socket.socketpair()
        self._connection = _Connection(ours)
        try:
            with theirs:
                self._process.launch(inherited_fd=theirs.fileno())
        except BaseException:
            self._end(patience=0.0)
            raise
        self._is_launched = True

    def start(self) -> None:
        """Build the engine in the process, which is launched first if need be; wait until it is ready."""
        if not self._is_launched:
            self.launch()
        connection, self._is_launched = self._connection, False
        if connection is None:
            raise EngineLostError(f"{self.name} was ended before it was ready.")
        try:
            connection.send_in_background(self._engine)
            with process_errors_as_engine_errors():
                self._process.wait_until_ready(connection.has_reply)
            reply = connection.receive()
        except BaseException:
            self._end(patience=0.0)
            raise
        if reply is None or "error" in reply:
            why = self._process.why_ended() if reply is None else reply["error"]
            self._end(patience=EXIT_SECONDS)  # the process still writes the traceback to its log
            raise EngineError(f"{self.name} does not start: {why}; {self._process.end_of_log()}")

    def generate(self, requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        """Yield responses as they finish; abort the others if the caller stops."""
        number = self._send({"do": "generate", "requests": _grouped(requests)})
        remaining = len(requests)
        try:
            while "finished" in (reply := self._receive(number, GENERATING, self._timeout)):
                if not reply["finished"]:  # a sign that tokens are sampled
                    continue
                remaining -= len(reply["finished"])
                yield [
                    (index, Sample(integers_from_text(ids), floats_from_text(logprobs)))
                    for index, ids, logprobs in reply["finished"]
                ]
        finally:
            if remaining:  # the caller has stopped
                with suppress(EngineError):
                    self._send({"do": "abort"})
        if remaining:
            raise EngineError(f"{self.name} left {remaining} of {len(requests)} requests without an answer")

    @property
    def updates_while_generating(self) -> bool:
        """Return False: any message ends the generation under way."""
        return False

    def generate_live(self, requests: Sequence[Request], most: int) -> Iterator[IndexedSamples]:
        """Yield responses; weights are not updated meanwhile."""
        return self.generate(requests)

    def pause(self) -> None:
        """Do nothing: nothing is being generated when weights are sent."""

    def resume(self) -> None:
        """Do nothing."""

    def set_version(self, version: int) -> None:
        """Do nothing: all tokens of a response come from the weights at its start."""

    def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of hacrl's worker extension; return one result per worker."""
        results: list[Any] = self._request(method, {"do": "call", "method": method, "arguments": arguments})
        return results

    def weight_transfer(self, method: str, request: Message | None = None) -> None:
        """Call a method of vLLM's weight-transfer API."""
        self._request(method, {"do": "weight_transfer", "method": method, "request": request})

    def reset_prefix_cache(self) -> None:
        """Drop cached keys and values."""
        self._request("resetting its prefix cache", {"do": "reset_prefix_cache"})

    def sleep(self) -> None:
        """Free the memory of weights and KV cache."""
        self._request("going to sleep", {"do": "sleep"})

    def wake(self, part: str) -> None:
        """Allocate memory again for ``weights`` or for the ``kv_cache``."""
        self._request(f"waking up ({part})", {"do": "wake", "part": part})

    def close(self) -> None:
        """End the process; one that still imports vLLM has nothing to clean up and ends at once."""
        self._end(patience=0.0 if self._is_launched else EXIT_SECONDS)

    def _end(self, patience: float) -> None:
        connection, self._connection, self._is_launched = self._connection, None, False
        if connection is not None:
            connection.close()  # the process then ends by itself
        self._process.end(patience)

    def _request(self, doing: str, message: Message) -> Any:
        return self._receive(self._send(message), doing)["result"]

    def _send(self, message: Message) -> int:
        """Send a numbered message; return its number."""
        connection = self._connection
        if connection is None:
            raise EngineLostError(f"{self.name} is not running.")
        self._last_number += 1
        with suppress(OSError):  # a dead process is noticed when no reply comes
            connection.send({**message, "number": self._last_number})
        return self._last_number

    def _receive(self, number: int, doing: str, seconds: float = RPC_SECONDS) -> Message:
        """Wait for the next reply to that message; raise for an engine that failed, or that is lost."""
        connection = self._connection
        try:
            while (reply := None if connection is None else connection.receive(seconds)) is not None:
                if reply["number"] == number:
                    break
            else:
                why = f"{self._process.why_ended()}, its log is {self._process.log}"
                raise EngineLostError(f"{self.name} died while {doing}: {why}.")
        except TimeoutError as error:
            is_generating = doing == GENERATING
            what = "sampled no token" if is_generating else f"gave no answer while {doing}"
            limit = " (vllm.timeout)" if is_generating else ""
            raise EngineLostError(
                f"{self.name} {what} for {seconds:g} s{limit}, its log is {self._process.log}."
            ) from error
        if reply.get("lost"):
            raise EngineLostError(f"{self.name} died while {doing}: {reply['error']}.")
        if "error" in reply:
            raise EngineError(f"{self.name} failed while {doing}: {reply['error']}")
        return reply


class _Connection:
    """hacrl's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()  # received, and not read yet

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def send_in_background(self, message: Message) -> None:
        """Send to a process that may not read yet, and return at once."""

        def send() -> None:
            with suppress(OSError):
                self.send(message)

        threading.Thread(target=send, name="hacrl-vllm", daemon=True).start()

    def has_reply(self) -> bool:
        """Return whether :meth:`receive` would not block: a message is there, or the connection has ended."""
        return bool(self._buffer) or self._has_bytes(0.0)

    def _has_bytes(self, seconds: float) -> bool:
        """Wait until there are bytes or the connection has ended; return False if neither is so in time."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # another thread has closed the connection
            return True
        return bool(poll.poll(1000 * seconds))

    def receive(self, seconds: float | None = None) -> Message | None:
        """Wait for the next message; return None if the connection has ended or the text is no JSON.

        Raise TimeoutError after so many seconds without a byte.
        """
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if seconds is not None and not self._has_bytes(seconds):
                raise TimeoutError
            try:
                received = self._socket.recv(2**20)
            except OSError:  # another thread has closed the connection
                return None
            if not received:
                return None
            self._buffer += received
        line, self._buffer = bytes(self._buffer[:end]), self._buffer[end + 1 :]
        try:
            message: Message = json.loads(line)
        except ValueError:
            return None
        return message

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes threads that wait in receive
        self._socket.close()


def _grouped(requests: Sequence[Request]) -> list[Any]:
    """Return (prompt, sampling fields, seeds) for each run of requests that differ in the seed alone."""
    groups = groupby(requests, lambda request: (request.prompt_ids, request.sampling, request.stop_ids))
    return [
        [same[0].prompt_ids, sampling_fields(same[0]), [request.seed for request in same]]
        for same in (list(group) for _, group in groups)
    ]


def _import_path() -> list[str]:
    """Return this process's import path, so that the child finds the same modules."""
    return [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
