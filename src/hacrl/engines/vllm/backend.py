"""The seam between hacrl and a vLLM engine, in a child process or behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hacrl.engines.base import Sample
from hacrl.engines.sync_check import EngineError
from hacrl.processes import ProcessError, ProcessLostError
from hacrl.types import Sampling


class EngineLostError(EngineError):
    """An engine died or no longer answers; starting it again may help."""


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
class Request:
    """One response to generate, in token ids."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    seed: int | None


IndexedSamples = list[tuple[int, Sample]]  # index of the request, and its sample


class Backend(Protocol):
    """A vLLM engine that serves one model."""

    name: str  # for messages
    can_sleep: bool  # whether the engine can offload weights and KV cache

    def start(self) -> None:
        """Start the engine, at first or after :class:`EngineLostError`; wait until it is ready."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        """Yield responses as they finish; raise :class:`EngineLostError` if the engine dies.

        Neighbouring requests that differ in nothing but the seed may be prepared once.
        """
        ...

    @property
    def updates_while_generating(self) -> bool:
        """Return whether weights can be sent between :meth:`pause` and :meth:`resume` of running requests."""
        ...

    def generate_live(self, requests: Sequence[Request], most: int) -> Iterator[IndexedSamples]:
        """Yield responses with the policy versions of their tokens; weights may be updated meanwhile.

        At most ``most`` requests are at the engine at a time, so that others need not wait for all of them.
        """
        ...

    def pause(self) -> None:
        """Sample no further token, and keep running requests with their keys and values."""
        ...

    def resume(self) -> None:
        """Go on with the requests that :meth:`pause` stopped."""
        ...

    def set_version(self, version: int) -> None:
        """Note the policy version of the engine's weights."""
        ...

    def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of hacrl's worker extension; return one result per worker."""
        ...

    def weight_transfer(self, method: str, request: dict[str, Any] | None = None) -> None:
        """Call a method of vLLM's weight-transfer API, e.g. ``update_weights``."""
        ...

    def reset_prefix_cache(self) -> None:
        """Drop cached keys and values, which belong to other weights."""
        ...

    def sleep(self) -> None:
        """Free the memory of weights and KV cache. Both are lost."""
        ...

    def wake(self, part: str) -> None:
        """Allocate memory again for ``weights`` or for the ``kv_cache``."""
        ...

    def close(self) -> None:
        """End the engine, if hacrl started it."""
        ...


def sampling_fields(request: Request) -> dict[str, Any]:
    """Return vLLM's sampling parameters but the seed, for its Python and its HTTP interface.

    Only the agent's own stop tokens end a response: ``ignore_eos`` switches off vLLM's. vLLM looks for stop
    strings in the whole text, as hacrl does: special tokens are part of the text, without spaces around them.
    """
    sampling = request.sampling
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,  # of the sampled token alone
    }
    if sampling.stop:
        fields |= {
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    return fields
