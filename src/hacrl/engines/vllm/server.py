"""The backend for vLLM behind HTTP: a server that hacrl starts and supervises, or one that runs already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm.backend import (
    EngineLostError,
    IndexedSamples,
    Request,
    process_errors_as_engine_errors,
)
from hacrl.engines.vllm.client import RPC_SECONDS, ServerClient
from hacrl.processes import SupervisedProcess

SERVER_HINT = (
    "weight updates need a server with VLLM_SERVER_DEV_MODE=1 and hacrl's worker extension: start it with "
    "`hacrl serve` (docs/vllm.md)"
)


class ServerBackend:
    """A vLLM server. With ``process``, hacrl starts, watches and ends the server."""

    def __init__(
        self,
        client: ServerClient,
        process: SupervisedProcess | None,
        can_sleep: bool,
        reports_versions: bool | None = None,  # None: ask the server
    ) -> None:
        self._reports_versions = reports_versions
        self.name = client.name
        self.can_sleep = can_sleep
        self._client = client
        self._process = process
        if process is not None:
            client.is_alive = process.is_alive

    def start(self) -> None:
        """Start the server if it is ours; raise if it is not ready."""
        if self._process is not None:
            with process_errors_as_engine_errors():
                self._process.start(self._client.is_healthy)
        elif not self._client.is_healthy():
            raise EngineLostError(
                f"{self.name} is not ready: nothing answers {self._client.url}/health with 200."
            )
        self._client.served_model()

    def generate(self, requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        """Yield responses as they finish."""
        return self._client.generate(requests)

    @property
    def updates_while_generating(self) -> bool:
        """Whether the server says which weights sampled which tokens. A server that sleeps gives up both."""
        if self._reports_versions is None:
            self._reports_versions = self._client.reports_versions()
        return self._reports_versions and not self.can_sleep

    def generate_live(self, requests: Sequence[Request], most: int) -> Iterator[IndexedSamples]:
        """Yield responses with the policy versions of their tokens."""
        return self._client.generate(requests, most)

    def pause(self) -> None:
        """Sample no further token, and keep running requests."""
        self._client.is_paused = True
        self._client.post("/pause?mode=keep&clear_cache=false", seconds=RPC_SECONDS)

    def resume(self) -> None:
        """Go on with running requests."""
        self._client.post("/resume", seconds=RPC_SECONDS)
        self._client.is_paused = False

    def set_version(self, version: int) -> None:
        """Let the server label tokens with the version, if it can."""
        self._client.version_label = str(version)
        if self.updates_while_generating:
            self._client.post("/update_weight_version", {"new_version": str(version)})

    def call(self, method: str, *arguments: str) -> list[Any]:
        """Call a method of hacrl's worker extension; return one result per worker."""
        body = {"method": method, "args": list(arguments)}
        try:
            answer = self._client.post("/collective_rpc", body, RPC_SECONDS)
        except EngineLostError:
            raise
        except EngineError as error:
            raise EngineError(f"{error}; {SERVER_HINT}") from error
        return list(answer["results"]) if answer else []

    def weight_transfer(self, method: str, request: dict[str, Any] | None = None) -> None:
        """Call a method of vLLM's weight-transfer API."""
        self._client.post(f"/{method}", request, RPC_SECONDS)

    def reset_prefix_cache(self) -> None:
        """Drop cached keys and values."""
        self._client.post("/reset_prefix_cache")

    def sleep(self) -> None:
        """Free the memory of weights and KV cache."""
        self._client.post("/sleep?level=2", seconds=RPC_SECONDS)

    def wake(self, part: str) -> None:
        """Allocate memory again for ``weights`` or for the ``kv_cache``."""
        self._client.post(f"/wake_up?tags={part}", seconds=RPC_SECONDS)

    def close(self) -> None:
        """End the server if it is ours."""
        if self._process is not None:
            self._process.end()
