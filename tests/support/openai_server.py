"""A small OpenAI-compatible server in this process. It samples from a tiny agent, and fails on demand."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from hacrl.engines.base import GenerationRequest
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.types import Problem, Sampling, Turn

# What a request gets instead of an answer: a status with headers and body, or a way to fail. None: an answer.
Fault = tuple[int, dict[str, str], str] | str | None


@dataclass
class OpenAIServer:
    """Serves one agent.

    ``fault``: called with the number of each request, from 0. ``counts_stop``: whether log-probabilities
    include the stop token, as vLLM's do and OpenAI's do not. ``gives_logprobs``: False for a server that
    ignores the question for them; None for one that refuses it.
    """

    agent: Agent
    fault: Callable[[int], Fault] = lambda _: None
    counts_stop: bool = True
    gives_logprobs: bool | None = True
    names_stop_reason: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    hanging: asyncio.Event | None = None  # what requests that hang wait for
    _at_once: int = 0
    _sampling: threading.Lock = field(default_factory=threading.Lock)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, or fail."""
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._answer(request)
        finally:
            self._at_once -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.requests)
        body = await request.json()
        self.requests.append({**body, "path": request.path})
        self.headers.append(dict(request.headers))
        fault = self.fault(number)
        if isinstance(fault, tuple):
            status, headers, text = fault
            return web.Response(status=status, headers=headers, text=text)
        if fault == "hang":
            assert self.hanging is not None
            await self.hanging.wait()
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault == "flood":
            return web.Response(text="[" + "0," * 2**20 + "0]")
        if body.get("logprobs") and self.gives_logprobs is None:
            return web.json_response({"error": {"message": "logprobs are not supported"}}, status=400)
        return web.json_response(
            await asyncio.to_thread(self._sample, body, request.path.endswith("chat/completions"))
        )

    def _sample(self, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        turns = [Turn(turn["role"], turn["content"]) for turn in body["messages"]] if is_chat else []
        prompt = turns[-1].content if is_chat else body["prompt"]
        problem = Problem("served", prompt, "", tuple(turns[:-1]))
        sampling = Sampling(body["max_tokens"], body["temperature"], 0, body["top_p"])
        stop_ids = frozenset(self.agent.stop_ids)
        asked = GenerationRequest([self.agent.encode_prompt(problem)], 1, sampling, stop_ids, body["seed"])
        with self._sampling:
            (sample,) = TransformersEngine(self.agent).generate(asked)
        stopped = sample.token_ids[-1] in stop_ids
        ids = sample.token_ids[:-1] if stopped else sample.token_ids
        text, stop_reason = self.agent.tokenizer.decode(ids), None
        for stop in body.get("stop", ()):
            if stop in text:
                text, stop_reason, stopped = text.partition(stop)[0], stop, True
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if stopped else "length"}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        if self.names_stop_reason:
            choice["stop_reason"] = stop_reason
        shown = sample.token_ids if self.counts_stop else ids
        if body.get("logprobs") and self.gives_logprobs:
            choice["logprobs"] = self._logprobs(shown, sample.logprobs, is_chat)
        usage = {"completion_tokens": len(sample.token_ids)}
        return {"object": "completion", "choices": [choice], "usage": usage}

    def _logprobs(self, ids: tuple[int, ...], logprobs: tuple[float, ...], is_chat: bool) -> dict[str, Any]:
        texts = [self.agent.tokenizer.decode([token]) for token in ids]
        values = [value if math.isfinite(value) else -9999.0 for value in logprobs[: len(ids)]]
        if not is_chat:
            return {"tokens": texts, "token_logprobs": values}
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
        }


@contextmanager
def serving(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serve on a free port of this machine within the block."""
    started, loop = threading.Event(), asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        server.hanging = asyncio.Event()
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/v1/chat/completions", server.handle)
        app.router.add_post("/v1/completions", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        (address,) = runner.addresses
        server.url = f"http://127.0.0.1:{address[1]}/v1"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        assert server.hanging is not None
        server.hanging.set()
        loop.run_until_complete(runner.cleanup())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
