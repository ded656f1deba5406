"""The HTTP client of a vLLM server."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import Sample
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm.backend import EngineLostError, IndexedSamples, Request, sampling_fields
from hacrl.types import merged_spans

ANSWER_SECONDS = 30.0  # a healthy server answers small requests at once
RPC_SECONDS = 1800.0  # enough for weights of a large model over a slow network
HEALTH_EVERY = 2.0  # seconds
HEALTH_MISSES = 5  # in a row, until a server counts as lost
GENERATE_PATH = "/inference/v1/generate"  # of servers that say which weights sampled which tokens
_SAMPLED = re.compile(r"^vllm:generation_tokens_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_DONE = object()
_Result = TypeVar("_Result")


class ServerClient:
    """One server's HTTP interface. All failures become engine errors that name the server.

    A thread of its own holds the requests, so that the caller may work on responses meanwhile.
    """

    def __init__(
        self,
        name: str,
        url: str,
        api_key: str | None,
        model: str | None = None,
        timeout: float = VllmSettings.timeout,
    ) -> None:
        self.name = name
        self._timeout = timeout  # seconds that the server may sample no token
        self.is_paused = False  # then it samples none for good reason
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = model
        self.version_label = "0"  # of the policy whose weights the server has
        self.is_alive: Callable[[], bool] = lambda: True  # replaced where hacrl supervises the process

    def is_healthy(self) -> bool:
        """Return whether the server reports that it is ready."""
        try:
            self._answer("GET", "/health")
        except EngineError:
            return False
        return True

    def served_model(self) -> str:
        """Return the model name for requests; raise unless the server is vLLM and accepts our key."""
        if self._model is None:
            listed = self._request("GET", "/v1/models")
            try:
                self._model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise EngineError(f"{self.name} lists no model: is it a vLLM server?") from error
        return self._model

    def version(self) -> str:
        """Return the version of the server's vLLM."""
        answer = self._request("GET", "/version")
        try:
            return str(answer["version"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"{self.name} does not say its version: is it a vLLM server?") from error

    def reports_versions(self) -> bool:
        """Return whether the server says which weights sampled which tokens."""
        try:
            self._answer("POST", GENERATE_PATH, {})
        except EngineLostError:
            raise
        except EngineError as error:  # a request without tokens is refused, a path that is missing not found
            return "HTTP 404" not in str(error)
        return True

    def post(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """Send a request; return the JSON answer."""
        return self._request("POST", path, body, seconds)

    def generate(self, requests: Sequence[Request], most: int | None = None) -> Iterator[IndexedSamples]:
        """Send all requests at once; yield responses as they finish. Cancel the rest if the caller stops.

        ``most``: send at most so many at a time, and return responses with the versions of their tokens.
        """
        self.served_model()
        finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        cancel: list[Callable[[], Any]] = []
        is_started = threading.Event()

        async def generate_all() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
            is_started.set()
            await self._generate(requests, finished, most)

        def run() -> None:
            try:
                asyncio.run(generate_all())
                finished.put(_DONE)
            except asyncio.CancelledError:
                pass
            except BaseException as error:
                finished.put(error)

        worker = threading.Thread(target=run, name="hacrl-vllm-requests", daemon=True)
        worker.start()
        is_started.wait()
        try:
            while (item := finished.get()) is not _DONE:
                if isinstance(item, BaseException):
                    raise item
                yield [item]
        finally:  # also if the caller stops
            if worker.is_alive():
                with suppress(RuntimeError):  # it ended just now
                    cancel[0]()
            worker.join()

    def _request(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """Send a request; return the answer's JSON, None if its body is empty."""
        text = self._answer(method, path, body, seconds)
        try:
            return json.loads(text) if text.strip() else None
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.name} answered {path} with no JSON: is it a vLLM server?") from error

    def _answer(self, method: str, path: str, body: Any = None, seconds: float | None = None) -> str:
        """Send a request; return the answer's text."""
        import aiohttp

        seconds = ANSWER_SECONDS if seconds is None else seconds

        async def exchange() -> tuple[int, str]:
            timeout = aiohttp.ClientTimeout(total=seconds, connect=min(seconds, ANSWER_SECONDS))
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as http,
                http.request(method, self.url + path, json=body) as answer,
            ):
                return answer.status, await answer.text()

        try:
            status, text = _run_in_thread(exchange())
        except TimeoutError as error:
            raise EngineLostError(f"{self.name} did not answer {path} within {seconds:g} s.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLostError(f"{self.name} cannot be reached: {error}.") from error
        self._check(status, text, path)
        return text

    def _check(self, status: int, text: str, path: str) -> None:
        if status == 200:
            return
        if status in (401, 403):
            raise EngineError(f"{self.name} refuses the API key (HTTP {status} for {path})")
        if status == 404:
            raise EngineError(f"{self.name} has no {path} (HTTP 404): {_reason(text)}")
        if status == 503 or not self.is_alive():
            raise EngineLostError(f"{self.name} cannot work (HTTP {status} for {path}).")
        raise EngineError(f"{self.name} answered {path} with HTTP {status}: {_reason(text)}")

    async def _generate(
        self, requests: Sequence[Request], finished: queue.SimpleQueue[Any], most: int | None
    ) -> None:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0)  # no limit: one connection per request
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_SECONDS)
        async with aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=timeout) as http:
            watching = asyncio.create_task(self._watch_health(http))
            complete = (
                self._complete if most is None else partial(self._complete_live, asyncio.Semaphore(most))
            )
            generating = [
                asyncio.create_task(complete(http, index, request, finished))
                for index, request in enumerate(requests)
            ]
            answered = asyncio.gather(*generating)
            either: list[asyncio.Future[Any]] = [watching, answered]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answered.done():
                    answered.result()  # raises the first error
                if watching.done():
                    watching.result()
            finally:
                for task in (watching, *generating):
                    task.cancel()
                await asyncio.gather(watching, *generating, return_exceptions=True)
                if answered.done() and not answered.cancelled():
                    answered.exception()  # marks the error as retrieved

    async def _complete(
        self, http: Any, index: int, request: Request, finished: queue.SimpleQueue[Any]
    ) -> None:
        body = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "return_token_ids": True,
            "seed": request.seed,
            **sampling_fields(request),
        }
        answer = await self._ask(http, "/v1/completions", body)
        finished.put((index, _completion(answer)))

    async def _complete_live(
        self,
        free: asyncio.Semaphore,
        http: Any,
        index: int,
        request: Request,
        finished: queue.SimpleQueue[Any],
    ) -> None:
        fields = sampling_fields(request)
        # vLLM finds stop strings in text alone
        fields |= {"seed": request.seed, "detokenize": "stop" in fields}
        async with free:
            body = {
                "model": self._model,
                "token_ids": list(request.prompt_ids),
                "sampling_params": fields,
                # cached keys and values of older weights must not serve requests to newer ones
                "cache_salt": f"policy {self.version_label}",
            }
            answer = await self._ask(http, GENERATE_PATH, body)
        finished.put((index, _generated(answer)))

    async def _ask(self, http: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a request for a response; return the answer's JSON."""
        import aiohttp

        try:
            async with http.post(self.url + path, json=body) as answer:
                status, text = answer.status, await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLostError(
                f"{self.name} broke off while generating ({type(error).__name__})."
            ) from error
        if status == 500:  # vLLM's answer to running requests when its engine dies
            raise EngineLostError(f"{self.name} failed while generating: {_reason(text)}.")
        self._check(status, text, path)
        found: dict[str, Any] = json.loads(text)
        return found

    async def _watch_health(self, http: Any) -> None:
        """Raise once the server fails its health checks: a server that hangs keeps its connections open."""
        import aiohttp

        misses, tokens, moved = 0, -1.0, time.monotonic()
        while misses < HEALTH_MISSES:
            await asyncio.sleep(HEALTH_EVERY)
            if not self.is_alive():
                raise EngineLostError(f"{self.name} has ended.")
            try:
                timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
                async with http.get(f"{self.url}/health", timeout=timeout) as answer:
                    misses = 0 if answer.status == 200 else misses + 1
                sampled = await self._sampled_tokens(http, timeout)
            except (aiohttp.ClientError, OSError):
                misses += 1
                continue
            if sampled is None or sampled != tokens or self.is_paused:
                tokens, moved = -1.0 if sampled is None else sampled, time.monotonic()
            elif time.monotonic() - moved > self._timeout:
                raise EngineLostError(
                    f"{self.name} sampled no token for {self._timeout:g} s while generating (vllm.timeout)."
                )
        raise EngineLostError(f"{self.name} no longer answers.")

    async def _sampled_tokens(self, http: Any, timeout: Any) -> float | None:
        """Return how many tokens the server has sampled since its start; None if it does not say."""
        async with http.get(f"{self.url}/metrics", timeout=timeout) as answer:
            text = await answer.text() if answer.status == 200 else ""
        found = _SAMPLED.findall(text)
        return sum(map(float, found)) if found else None


def _run_in_thread(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine in a thread: the caller's may run an event loop already, as in notebooks."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _completion(answer: dict[str, Any]) -> Sample:
    choice = answer["choices"][0]
    return Sample(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]))


def _generated(answer: dict[str, Any]) -> Sample:
    choice = answer["choices"][0]
    logprobs = tuple(float(entry["logprob"]) for entry in choice["logprobs"]["content"])
    spans = ((int(span["version"]), span["end"] - span["start"]) for span in choice["weight_versions"])
    return Sample(tuple(choice["token_ids"]), logprobs, merged_spans(spans))


def _reason(text: str) -> str:
    """Return the error message in an answer, at most 500 characters."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return text[:500]
    found = body.get("error", body) if isinstance(body, dict) else body
    return str(found.get("message", found) if isinstance(found, dict) else found)[:500]
