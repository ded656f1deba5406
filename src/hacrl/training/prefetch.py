"""Build the next result in a thread while the last one is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Result = TypeVar("Result")


class Prefetch(Generic[Result]):
    """Returns the results of ``builds`` in order, and prefetches the next result.

    A build starts when the result before it is fetched. An error is raised by :meth:`next`.
    """

    def __init__(self, builds: Iterable[Callable[[], Result]]) -> None:
        self._builds = deque(builds)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hacrl-prefetch")
        self._pending: Future[Result] | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def next(self) -> Result:
        """Return the next result; wait if it is not ready."""
        assert self._pending is not None, "there are no more builds"
        result = self._pending.result()
        self._begin()
        return result

    def _begin(self) -> None:
        self._pending = self._thread.submit(self._builds.popleft()) if self._builds else None
