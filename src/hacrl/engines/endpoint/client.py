"""The HTTP client of an endpoint: many requests at a time, sent again where that may help.

Every wait has a limit. A request ends with a reply, or with the reason why there is none. What will never be
better, a wrong key or address, ends the run at once.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hacrl.config.endpoint import EndpointSettings
from hacrl.engines.endpoint.replies import Reply, UnusableReplyError, read_reply
from hacrl.errors import TrainingError

PATHS = {"chat": "chat/completions", "completions": "completions"}
FIRST_WAIT = 1.0  # seconds before a request is sent again; doubled every time
LONGEST_WAIT = 60.0
LONGEST_ASKED_WAIT = 300.0  # that an endpoint may ask for (Retry-After)
AGAIN = frozenset((408, 409, 425, 429))  # and all of 500 and above
NEVER = frozenset((401, 403, 404, 405))  # no request will be answered
LONGEST_REPLY = 2**20  # bytes, and for every token that was asked for:
REPLY_PER_TOKEN = 4096
QUOTED = 200  # characters of a server's message
_DONE = object()


class EndpointError(TrainingError):
    """An endpoint that answers nothing, or too little."""


class TooFewRepliesError(EndpointError):
    """An endpoint that left too many requests unanswered; ``reasons`` says why, with counts."""

    def __init__(self, message: str, reasons: str) -> None:
        super().__init__(message)
        self.reasons = reasons

    def __reduce__(self) -> tuple[type[TooFewRepliesError], tuple[str, str]]:
        """Survive the way from another process."""
        return type(self), (str(self.args[0]), self.reasons)


@dataclass(frozen=True)
class Unanswered:
    """A request without a reply."""

    reason: str


@dataclass(frozen=True)
class Question:
    """One request for one response."""

    body: Mapping[str, Any]  # without model
    seed: int  # of the waits between attempts
    has_stop_strings: bool
    max_tokens: int


class _TryAgainError(Exception):
    """An attempt that failed in a way that may pass; ``wait``: seconds that the endpoint asks for."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class EndpointClient:
    """Sends requests to one endpoint. ``key`` is in no message."""

    def __init__(self, name: str, settings: EndpointSettings, key: str | None) -> None:
        self.url = f"{settings.url.rstrip('/')}/{PATHS[settings.interface]}"
        self._name = name
        self._settings = settings
        self._key = key

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply | Unanswered]]:
        """Send all questions; yield the number and the end of each as it comes.

        Requests under way are cancelled if the caller stops. A thread of its own holds them, so that the
        caller may work meanwhile.
        """
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        cancel: list[Callable[[], Any]] = []
        is_started = threading.Event()

        async def ask_all() -> None:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
            is_started.set()
            await self._ask_all(questions, ended)

        def run() -> None:
            try:
                asyncio.run(ask_all())
                ended.put(_DONE)
            except asyncio.CancelledError:
                pass
            except BaseExceptionGroup as group:  # of the requests that were under way
                ended.put(group.exceptions[0])
            except BaseException as error:  # raised again by the caller's thread
                ended.put(error)
            finally:
                is_started.set()

        thread = threading.Thread(target=run, name=f"hacrl-endpoint-{self._name}", daemon=True)
        thread.start()
        is_started.wait()
        try:
            while (item := ended.get()) is not _DONE:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:  # also if the caller stops
            if thread.is_alive() and cancel:
                with suppress(RuntimeError):  # it ended just now
                    cancel[0]()
            thread.join()

    async def _ask_all(self, questions: Sequence[Question], ended: queue.SimpleQueue[Any]) -> None:
        import aiohttp

        waiting = iter(enumerate(questions))
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

            async def work() -> None:
                for number, question in waiting:  # shared: each question is taken once
                    ended.put((number, await self._answer(session, question)))

            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.max_concurrency, len(questions))):
                    group.create_task(work())

    async def _answer(self, session: Any, question: Question) -> Reply | Unanswered:
        """Return the reply, after as many attempts as the settings allow."""
        settings, rng = self._settings, random.Random(question.seed)
        for attempt in range(settings.retries + 1):
            try:
                return await self._attempt(session, question)
            except UnusableReplyError as error:
                return Unanswered(str(error))
            except _TryAgainError as error:
                if attempt == settings.retries:
                    times = f" ({settings.retries + 1} attempts)" if settings.retries else ""
                    return Unanswered(f"{error}{times}")
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt) * rng.uniform(0.75, 1.25)
                if error.wait is not None:
                    wait = max(wait, min(LONGEST_ASKED_WAIT, error.wait))
                await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    async def _attempt(self, session: Any, question: Question) -> Reply:
        import aiohttp

        body = {"model": self._settings.model, **question.body}
        longest = LONGEST_REPLY + REPLY_PER_TOKEN * question.max_tokens
        try:
            async with session.post(self.url, json=body, allow_redirects=False) as response:
                content = await _read(response, longest)
                status, headers = response.status, response.headers
        except TimeoutError:
            raise _TryAgainError(f"no reply within {self._settings.timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _TryAgainError(
                f"the connection failed: {self._quoted(str(error) or type(error).__name__)}"
            ) from None
        self._check_status(status, headers, content)
        try:
            data = json.loads(content)
        except (ValueError, RecursionError):
            raise _TryAgainError("the reply is not JSON") from None
        return read_reply(data, self._settings.interface, question.has_stop_strings)

    def _check_status(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        if status == 200:
            return
        reason = f"HTTP {status}: {self._quoted(_message(content))}"
        if status in AGAIN or status >= 500:
            raise _TryAgainError(reason, _seconds(headers.get("Retry-After")))
        if status in NEVER or 300 <= status < 400:
            fix = {
                401: "check the key in api_key_env",
                403: "check the key in api_key_env, and that it may use the model",
                404: "check url, interface and model",
                405: "check url and interface",
            }.get(
                status, f"the address has moved to {self._quoted(headers.get('Location', '?'))}: correct url"
            )
            raise EndpointError(f"agents.{self._name}.endpoint: {self.url} answers {reason}; {fix}")
        raise UnusableReplyError(reason)

    def _quoted(self, text: str) -> str:
        """Return the start of a server's words, without the key."""
        text = text if not self._key else text.replace(self._key, "***")
        return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


async def _read(response: Any, longest: int) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > longest:
            raise UnusableReplyError(f"the reply is longer than {longest:,} bytes")
    return bytes(content)


def _message(content: bytes) -> str:
    """Return the message in the body of an error, or the body's beginning."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    error = data.get("error") if isinstance(data, Mapping) else None
    found = error.get("message") if isinstance(error, Mapping) else error
    return found if isinstance(found, str) else content[: 4 * QUOTED].decode(errors="replace").strip()


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None without one, and for a date."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if seconds >= 0 else None
