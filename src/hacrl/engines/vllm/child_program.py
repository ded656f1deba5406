"""The program of an engine's child process: runs vLLM as lines of JSON ask it to.

``python -m hacrl.engines.vllm.child_program FD``, with the number of a socket. The program ends when the
connection does.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hacrl.engines.numbers_as_text import floats_to_text, integers_to_text

WORKER_SECONDS = 30.0  # for healthy workers to describe themselves
ALIVE_SECONDS = 2.0  # most time between two messages while tokens are sampled
Message = dict[str, Any]


class _Connection:
    """The connection to hacrl. Threads read and write, so that the engine never waits for either."""

    def __init__(self, end: socket.socket) -> None:
        self.received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the connection ended
        self._file = end.makefile("rwb")
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message, without waiting."""
        self._outgoing.put(json.dumps(message).encode() + b"\n")

    def finish(self) -> None:
        """Return when all messages were written."""
        self._outgoing.put(None)
        self._writer.join()

    def _read(self) -> None:
        try:
            for line in self._file:
                self.received.put(json.loads(line))
        except (OSError, ValueError):
            pass
        self.received.put(None)

    def _write(self) -> None:
        try:
            while (line := self._outgoing.get()) is not None:
                self._file.write(line)
                if self._outgoing.empty():
                    self._file.flush()
            self._file.flush()
        except OSError:
            pass  # the reading thread reports it


class Engine:
    """One ``vllm.LLM``."""

    def __init__(self, engine_args: Mapping[str, Any], worker: str, reads_text: bool) -> None:
        from vllm import LLM

        self._llm = LLM(
            **engine_args,
            worker_extension_cls=worker,
            skip_tokenizer_init=not reads_text,  # token ids in, token ids out
            disable_log_stats=True,
        )
        self._num_requests = 0
        self._has_failed = False  # in the middle of a step, after which vLLM cannot go on

    def handle(self, message: Message, connection: _Connection) -> Any:
        """Do what the message asks; return a result that fits into JSON."""
        llm, number = self._llm, message["number"]
        actions: dict[str, Callable[[], Any]] = {
            "generate": lambda: self._generate(message["requests"], number, connection),
            "call": lambda: llm.collective_rpc(message["method"], args=tuple(message["arguments"])),
            "weight_transfer": lambda: self._weight_transfer(message["method"], message["request"]),
            "reset_prefix_cache": self._reset_prefix_cache,
            # 2: the learner has the weights, so vLLM need not keep them
            "sleep": lambda: llm.sleep(level=2),
            "wake": lambda: llm.wake_up(tags=[message["part"]]),
            "abort": lambda: None,  # its arrival has ended the generation
        }
        return actions[message["do"]]()

    def is_broken(self) -> bool:
        """Return whether the engine must be started again, e.g. because a worker process has died."""
        if self._has_failed:
            return True
        try:
            self._llm.collective_rpc("hacrl_describe", timeout=WORKER_SECONDS)
        except Exception:  # whatever vLLM raises if a worker does not answer
            return True
        return False

    def _generate(self, groups: list[Any], number: int, connection: _Connection) -> None:
        """Send the responses that finish in each step, until all have or another message arrives."""
        engine = self._llm.llm_engine
        indices: dict[str, int] = {}  # of running requests, by vLLM's id
        try:
            index = 0
            for prompt_ids, fields, seeds in groups:
                for seed in seeds:
                    self._num_requests += 1
                    engine.add_request(str(self._num_requests), *_request(prompt_ids, seed, fields))
                    indices[str(self._num_requests)] = index
                    index += 1
            last_sent = time.monotonic()
            while engine.has_unfinished_requests() and connection.received.empty():
                finished = [
                    (indices.pop(output.request_id), *_encoded(output.outputs[0]))
                    for output in self._step()
                    if output.finished and output.request_id in indices
                ]
                # Also without responses every so often, so that hacrl knows that tokens are sampled.
                if finished or time.monotonic() - last_sent > ALIVE_SECONDS:
                    connection.send({"number": number, "finished": finished})
                    last_sent = time.monotonic()
        finally:
            if indices and not self._has_failed:  # the caller has stopped, or vLLM refused a request
                engine.abort_request(list(indices))

    def _step(self) -> Any:
        try:
            return self._llm.llm_engine.step()
        except Exception:
            self._has_failed = True
            raise

    def _weight_transfer(self, method: str, request: Message | None) -> None:
        """Call a method of vLLM's weight-transfer API."""
        getattr(self._llm, method)(*([] if request is None else [request]))

    def _reset_prefix_cache(self) -> None:
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("keys and values of older weights are still in use")


def _request(prompt_ids: list[int], seed: int | None, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's prompt and sampling parameters, in the forms that cost vLLM the least time."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    params = SamplingParams(
        **fields,
        seed=seed,
        detokenize="stop" in fields,  # vLLM finds stop strings in text alone
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,  # plain lists instead of an object and a dict per token
        skip_clone=True,  # no other request uses these parameters
    )
    return tokens_input(prompt_ids), params


def _encoded(completion: Any) -> tuple[str, str]:
    """Return the token ids and their log-probabilities as text."""
    flat = completion.logprobs
    # the sampled token stands first at its position
    logprobs = [flat.logprobs[first] for first in flat.start_indices]
    return integers_to_text(completion.token_ids), floats_to_text(logprobs)


def main() -> None:
    """Serve until the connection ends or the engine is broken."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is the engine's own already
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)  # vLLM's own processes must not keep the connection open
    connection = _Connection(end)
    try:
        from vllm import LLM  # noqa: F401 - slow, so imported before this engine may start

        first = connection.received.get()
        if first is None:
            return
        engine = Engine(**first)
    except Exception as error:
        connection.send({"error": _text(error)})
        connection.finish()
        raise
    connection.send({"result": None})
    is_lost = False
    while not is_lost and (message := connection.received.get()) is not None:
        try:
            connection.send({"number": message["number"], "result": engine.handle(message, connection)})
        except Exception as error:  # whatever a worker raised, as vLLM passes it on
            is_lost = engine.is_broken()
            connection.send({"number": message["number"], "error": _text(error), "lost": is_lost})
            traceback.print_exc()
    connection.finish()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
