"""vLLM behind HTTP: a server that hacrl starts and looks after, or one that is already running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hacrl.engines.vllm.backend import (
    Ask,
    Ended,
    EngineError,
    EngineLostError,
    process_errors_as_engine_errors,
)
from hacrl.engines.vllm.client import RPC_SECONDS, ServerClient
from hacrl.processes import SupervisedProcess

NEEDED = (
    "weight updates need a server with VLLM_SERVER_DEV_MODE=1 and hacrl's worker extension: start it with "
    "`hacrl serve` (docs/vllm.md)"
)


class ServerBackend:
    """A vLLM server. With a process it is ours: started, watched and ended here."""

    def __init__(self, client: ServerClient, process: SupervisedProcess | None, can_sleep: bool) -> None:
        self.name = client.name
        self.can_sleep = can_sleep
        self._client = client
        self._process = process
        if process is not None:
            client.is_alive = process.is_alive

    def start(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        if self._process is not None:
            with process_errors_as_engine_errors():
                self._process.start(self._client.is_healthy)
        elif not self._client.is_healthy():
            raise EngineLostError(
                f"{self.name} is not ready: nothing answers {self._client.url}/health with 200."
            )
        self._client.served_model()

    def generate(self, asks: Sequence[Ask]) -> Iterator[Ended]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        return self._client.generate(asks)

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        body = {"method": method, "args": list(arguments)}
        try:
            answer = self._client.post("/collective_rpc", body, RPC_SECONDS)
        except EngineLostError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; {NEEDED}") from error
        return list(answer["results"]) if answer else []

    def forget_prefixes(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._client.post("/reset_prefix_cache")

    def sleep(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._client.post("/sleep?level=2", seconds=RPC_SECONDS)

    def wake(self, part: str) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._client.post(f"/wake_up?tags={part}", seconds=RPC_SECONDS)

    def close(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        if self._process is not None:
            self._process.end()
