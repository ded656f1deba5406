"""vLLM beside the learner in one Python process. Its computing part runs in a child process of its own."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Any

from hacrl.rollout.vllm.backend import Ask, EngineError, EngineLostError, Said, sampling_fields
from hacrl.rollout.vllm.guard import Guard

WORKER = "hacrl.rollout.vllm.in_vllm.hacrl_vllm_worker.WeightReceiver"
LOOK_EVERY = 2.0  # seconds between looks at whether the child process is still there


class InProcessBackend:
    """``vllm.LLM``. The child process gives each engine a memory pool it can put to sleep alone."""

    def __init__(
        self, name: str, engine_args: Mapping[str, Any], environment: Mapping[str, str], can_sleep: bool
    ) -> None:
        self.name = f"vLLM engine of agent {name!r}"
        self.can_sleep = can_sleep
        self._engine_args = dict(engine_args)
        self._environment = dict(environment)
        self._llm: Any = None
        self._guard: Guard | None = None
        self._children: list[BaseProcess] = []
        self._asked = 0

    def start(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self.close()
        with _environment(self._environment):
            from vllm import LLM  # its logger reads the environment when it is imported

            earlier = set(multiprocessing.active_children())
            try:
                self._llm = LLM(
                    **self._engine_args,
                    worker_extension_cls=WORKER,
                    skip_tokenizer_init=True,  # token ids in, token ids out
                    disable_log_stats=True,
                )
            except (RuntimeError, ValueError, TypeError, OSError, AssertionError) as error:
                raise EngineError(f"{self.name} does not start: {error}") from error
        self._children = [child for child in multiprocessing.active_children() if child not in earlier]
        self._guard = Guard([child.pid for child in self._children if child.pid is not None])

    def generate(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Said]]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        engine = self._llm.llm_engine
        positions: dict[str, int] = {}
        finished: queue.SimpleQueue[tuple[int, Said] | None] = queue.SimpleQueue()
        is_left = threading.Event()  # by whoever takes responses

        def work() -> None:
            for position, ask in enumerate(asks):
                self._asked += 1
                positions[str(self._asked)] = position
                engine.add_request(str(self._asked), *_request(ask))
            while engine.has_unfinished_requests() and not is_left.is_set():
                for output in engine.step():
                    if output.finished:
                        finished.put((positions.pop(output.request_id), _said(output.outputs[0])))
            if positions:
                engine.abort_request(list(positions))
            finished.put(None)

        result = self._begin(work)
        try:
            while (item := self._next(finished, result, "generating")) is not None:
                yield item
        finally:
            is_left.set()
            with suppress(EngineError):  # what went wrong has been told, or nobody asks any more
                self._wait(result, "stopping")

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        results: list[Any] = self._do(method, lambda: self._llm.collective_rpc(method, args=arguments))
        return results

    def forget_prefixes(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self._do("resetting its prefix cache", self._llm.reset_prefix_cache)

    def sleep(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        # 2: weights are not kept either, the learner has them
        self._do("going to sleep", lambda: self._llm.sleep(level=2))

    def wake(self, part: str) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self._do(f"waking up ({part})", lambda: self._llm.wake_up(tags=[part]))

    def close(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end()

    def _do(self, doing: str, work: Callable[[], Any]) -> Any:
        """Let vLLM work, and wait for it."""
        return self._wait(self._begin(work), doing)

    def _begin(self, work: Callable[[], Any]) -> Future[Any]:
        """In a thread, because vLLM waits for ever for a child process that was killed: we must not."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except Exception as error:
                result.set_exception(error)

        threading.Thread(target=run, name="hacrl-vllm", daemon=True).start()
        return result

    def _wait(self, result: Future[Any], doing: str) -> Any:
        """Its result; its errors get the engine's name, and a dead engine is told from a mere failure."""
        from vllm.v1.engine.exceptions import EngineDeadError

        while not wait([result], timeout=LOOK_EVERY).done:
            self._check_alive(doing)
        try:
            return result.result()
        except EngineDeadError as error:
            raise EngineLostError(f"{self.name} died while {doing}: {error}.") from error
        except Exception as error:  # whatever the worker raised, as vLLM passes it on
            raise EngineError(f"{self.name} failed while {doing}: {error}") from error

    def _next(self, items: queue.SimpleQueue[Any], result: Future[Any], doing: str) -> Any:
        """The next item; if the work ends without one, its error."""
        while True:
            with suppress(queue.Empty):
                return items.get(timeout=LOOK_EVERY)
            if result.done():
                if items.empty():
                    self._wait(result, doing)
            else:
                self._check_alive(doing)

    def _check_alive(self, doing: str) -> None:
        if not all(child.is_alive() for child in self._children):
            raise EngineLostError(f"{self.name} died while {doing}: its process is gone.")


def _request(ask: Ask) -> tuple[Any, Any]:
    """A prompt and its sampling parameters, as vLLM takes them with the least work for each response."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    params = SamplingParams(
        **sampling_fields(ask),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        flat_logprobs=True,  # plain lists; else an object and a dict for every token
        skip_clone=True,  # nobody else has these parameters
    )
    return tokens_input(list(ask.prompt_ids)), params


def _said(completion: Any) -> Said:
    flat = completion.logprobs
    # the sampled token stands first at its position
    return Said(tuple(completion.token_ids), tuple([flat.logprobs[first] for first in flat.start_indices]))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables that the engine's child process starts with; ours are as before afterwards."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
