"""An event loop in a thread of its own, so that ``async`` functions can be called from plain code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class LoopThread:
    """Runs coroutines side by side, all in one loop: clients and locks that belong to it stay valid.

    Its own thread, because a notebook already has a running loop in the main one.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._runner: asyncio.Runner | None = None

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Their results, in order."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hacrl-rewards")
            self._runner = asyncio.Runner()
        assert self._runner is not None
        return self._thread.submit(self._runner.run, _all(coroutines)).result()

    def close(self) -> None:
        """Close the loop and end the thread; a later call starts new ones."""
        if self._thread is not None and self._runner is not None:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
            self._thread = self._runner = None


async def _all(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))
