"""What hacrl asks of a vLLM engine, wherever it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hacrl.errors import HacrlError
from hacrl.processes import ProcessError, ProcessLostError
from hacrl.types import Sampling


class EngineError(HacrlError, RuntimeError):
    """An engine cannot be used; the message says which and what to do."""


class EngineLostError(EngineError):
    """An engine died or no longer answers; starting it again may help."""


class OtherPolicyError(EngineError):
    """An engine computes something else than the agent; bringing the weights again may help."""


@contextmanager
def process_errors_as_engine_errors() -> Iterator[None]:
    """Raise errors of an engine's process as errors of the engine."""
    try:
        yield
    except ProcessLostError as error:
        raise EngineLostError(str(error)) from error
    except ProcessError as error:
        raise EngineError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Ask:
    """One response that is asked for, in token ids."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Said:
    """One response, with the log-probabilities it was sampled with."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


Ended = list[tuple[int, Said]]  # position among what was asked for, and response


class Backend(Protocol):
    """A vLLM engine that serves one model."""

    name: str  # for messages: where the engine is
    can_sleep: bool  # whether memory can be given back and taken again

    def start(self) -> None:
        """Be ready for requests, from nothing or after :class:`EngineLostError`."""
        ...

    def generate(self, asks: Sequence[Ask]) -> Iterator[Ended]:
        """Responses as they finish, those of a moment together; :class:`EngineLostError` if the engine dies.

        What is asked several times side by side, but for the seed, may be prepared once.
        """
        ...

    def call(self, method: str, *arguments: str) -> list[Any]:
        """Run a method of hacrl's part of vLLM's workers; one result per worker."""
        ...

    def forget_prefixes(self) -> None:
        """Drop cached keys and values: those of other weights are wrong."""
        ...

    def sleep(self) -> None:
        """Give back the memory of weights and cache. Both are lost."""
        ...

    def wake(self, part: str) -> None:
        """Take memory again for ``weights`` or for the ``kv_cache``."""
        ...

    def close(self) -> None:
        """End the engine, if it is ours."""
        ...


def sampling_fields(ask: Ask) -> dict[str, Any]:
    """vLLM's names for all but the seed, the same in its Python and its HTTP interface.

    Only the agent's own stop tokens end a response: vLLM's idea of eos is switched off.
    """
    sampling = ask.sampling
    return {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(ask.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }
