"""What is needed next, made while what came before is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Made = TypeVar("Made")


class Ahead(Generic[Made]):
    """Results in the order of their makers, one of them in the making at a time, in another thread.

    A maker begins when the result before its own is fetched. What it raises is raised where its result is.
    """

    def __init__(self, makers: Iterable[Callable[[], Made]]) -> None:
        self._makers = deque(makers)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hacrl-ahead")
        self._making: Future[Made] | None = None

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

    def fetch(self) -> Made:
        """The next one; waits if it is not ready."""
        assert self._making is not None, "as many are fetched as there are makers"
        made = self._making.result()
        self._begin()
        return made

    def _begin(self) -> None:
        self._making = self._thread.submit(self._makers.popleft()) if self._makers else None
