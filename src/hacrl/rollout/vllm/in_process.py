"""vLLM beside the learner in one Python process. Its computing part runs in a child process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hacrl.rollout.vllm.backend import Ask, EngineError, EngineLostError, Said, sampling_fields
from hacrl.rollout.vllm.guard import Guard

WORKER = "hacrl.rollout.vllm.in_vllm.hacrl_vllm_worker.WeightReceiver"


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
        self._asked = 0

    def start(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        self.close()
        with _environment(self._environment):
            from vllm import LLM  # its logger reads the environment when it is imported

            earlier = {child.pid for child in multiprocessing.active_children()}
            try:
                self._llm = LLM(
                    **self._engine_args,
                    worker_extension_cls=WORKER,
                    skip_tokenizer_init=True,  # token ids in, token ids out
                    disable_log_stats=True,
                )
            except (RuntimeError, ValueError, TypeError, OSError, AssertionError) as error:
                raise EngineError(f"{self.name} does not start: {error}") from error
        started = {child.pid for child in multiprocessing.active_children()} - earlier
        self._guard = Guard([pid for pid in started if pid is not None])

    def generate(self, asks: Sequence[Ask]) -> Iterator[tuple[int, Said]]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        engine = self._llm.llm_engine
        positions = {}
        with self._explained("generating"):
            for position, ask in enumerate(asks):
                self._asked += 1
                positions[str(self._asked)] = position
                params = SamplingParams(
                    **sampling_fields(ask), detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
                )
                engine.add_request(str(self._asked), {"prompt_token_ids": list(ask.prompt_ids)}, params)
        try:
            while engine.has_unfinished_requests():
                with self._explained("generating"):
                    outputs = engine.step()
                for output in outputs:
                    if output.finished:
                        yield positions.pop(output.request_id), _said(output.outputs[0])
        finally:  # whoever takes responses may stop taking them
            if positions and self._llm is not None:
                with suppress(Exception):
                    engine.abort_request(list(positions))

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        with self._explained(method):
            results: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return results

    def forget_prefixes(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        with self._explained("resetting its prefix cache"):
            self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        with self._explained("going to sleep"):
            self._llm.sleep(level=2)  # 2: weights are not kept either, the learner has them

    def wake(self, part: str) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        with self._explained(f"waking up ({part})"):
            self._llm.wake_up(tags=[part])

    def close(self) -> None:
        """See :class:`hacrl.rollout.vllm.backend.Backend`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end()

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """vLLM's errors, with the engine's name in front; a dead engine is told from a mere failure."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineLostError(f"{self.name} died while {doing}: {error}.") from error
        except Exception as error:  # whatever the worker raised, as vLLM passes it on
            raise EngineError(f"{self.name} failed while {doing}: {error}") from error


def _said(completion: Any) -> Said:
    token_ids = tuple(completion.token_ids)
    logprobs = (at[token].logprob for token, at in zip(token_ids, completion.logprobs, strict=True))
    return Said(token_ids, tuple(logprobs))


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
