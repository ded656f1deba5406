"""The program of an engine's own process: vLLM, told what to do by lines of JSON.

``python -m hacrl.engines.vllm.child_program FD``: the number of a socket. It ends when the other end is gone.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from hacrl.engines.vllm.numbers_as_text import floats_to_text, integers_to_text

ANSWER_SECONDS = 30.0  # in which workers that are well say what they are
Told = dict[str, Any]


class _Line:
    """The connection to hacrl. Neither reading nor writing ever waits."""

    def __init__(self, end: socket.socket) -> None:
        self.told: queue.SimpleQueue[Told | None] = queue.SimpleQueue()  # None: nobody is there any more
        self._file = end.makefile("rwb")
        self._to_say: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writing = threading.Thread(target=self._write, daemon=True)
        self._writing.start()
        threading.Thread(target=self._read, daemon=True).start()

    def say(self, what: Told) -> None:
        self._to_say.put(json.dumps(what).encode() + b"\n")

    def finish(self) -> None:
        """Return when everything was said."""
        self._to_say.put(None)
        self._writing.join()

    def _read(self) -> None:
        try:
            for text in self._file:
                self.told.put(json.loads(text))
        except (OSError, ValueError):
            pass
        self.told.put(None)

    def _write(self) -> None:
        try:
            while (what := self._to_say.get()) is not None:
                self._file.write(what)
                if self._to_say.empty():
                    self._file.flush()
            self._file.flush()
        except OSError:
            pass  # told by the reading thread


class Engine:
    """One ``vllm.LLM``."""

    def __init__(self, engine_args: Mapping[str, Any], worker: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            **engine_args,
            worker_extension_cls=worker,
            skip_tokenizer_init=True,  # token ids in, token ids out
            disable_log_stats=True,
        )
        self._asked = 0
        self._has_failed = False  # in the middle of a step: vLLM cannot go on after that

    def do(self, told: Told, line: _Line) -> Any:
        """What was asked for; the result fits into JSON."""
        llm, number = self._llm, told["number"]
        actions: dict[str, Callable[[], Any]] = {
            "generate": lambda: self._generate(told["asks"], number, line),
            "call": lambda: llm.collective_rpc(told["method"], args=tuple(told["arguments"])),
            "forget_prefixes": self._forget_prefixes,
            # 2: weights are not kept either, the learner has them
            "sleep": lambda: llm.sleep(level=2),
            "wake": lambda: llm.wake_up(tags=[told["part"]]),
            "leave": lambda: None,  # of what has ended
        }
        return actions[told["do"]]()

    def is_broken(self) -> bool:
        """Whether it has to be started again; a process that it computes with may be gone."""
        if self._has_failed:
            return True
        try:
            self._llm.collective_rpc("hacrl_describe", timeout=ANSWER_SECONDS)
        except Exception:  # whatever vLLM raises if a worker does not answer
            return True
        return False

    def _generate(self, asks: list[Any], number: int, line: _Line) -> None:
        """Say what has ended in each step, until all have or something else is asked for."""
        engine = self._llm.llm_engine
        places: dict[str, int] = {}  # of those under way
        try:
            place = 0
            for prompt_ids, fields, seeds in asks:
                for seed in seeds:
                    self._asked += 1
                    engine.add_request(str(self._asked), *_request(prompt_ids, seed, fields))
                    places[str(self._asked)] = place
                    place += 1
            while engine.has_unfinished_requests() and line.told.empty():
                ended = [
                    (places.pop(output.request_id), *_said(output.outputs[0]))
                    for output in self._step()
                    if output.finished and output.request_id in places
                ]
                if ended:
                    line.say({"number": number, "ended": ended})
        finally:
            if places and not self._has_failed:  # whoever asked has left, or one was refused
                engine.abort_request(list(places))

    def _step(self) -> Any:
        try:
            return self._llm.llm_engine.step()
        except Exception:
            self._has_failed = True
            raise

    def _forget_prefixes(self) -> None:
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("keys and values of older weights are still in use")


def _request(prompt_ids: list[int], seed: int | None, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """A prompt and its sampling parameters, as vLLM takes them with the least work for each response."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    params = SamplingParams(
        **fields,
        seed=seed,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,  # plain lists; else an object and a dict for every token
        skip_clone=True,  # nobody else has these parameters
    )
    return tokens_input(prompt_ids), params


def _said(completion: Any) -> tuple[str, str]:
    """Token ids and their log-probabilities."""
    flat = completion.logprobs
    # the sampled token stands first at its position
    logprobs = [flat.logprobs[first] for first in flat.start_indices]
    return integers_to_text(completion.token_ids), floats_to_text(logprobs)


def main() -> None:
    """Until nobody is there any more, or the engine is broken."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this is the process of its own
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)  # it closes with this process, whatever that has started
    line = _Line(end)
    try:
        from vllm import LLM  # noqa: F401 - takes long, and need not wait until this engine may start

        first = line.told.get()
        if first is None:
            return
        engine = Engine(**first)
    except Exception as error:
        line.say({"error": _text(error)})
        line.finish()
        raise
    line.say({"done": None})
    is_lost = False
    while not is_lost and (told := line.told.get()) is not None:
        try:
            line.say({"number": told["number"], "done": engine.do(told, line)})
        except Exception as error:  # whatever a worker raised, as vLLM passes it on
            is_lost = engine.is_broken()
            line.say({"number": told["number"], "error": _text(error), "lost": is_lost})
            traceback.print_exc()
    line.finish()


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


if __name__ == "__main__":
    main()
