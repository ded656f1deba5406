"""The contract of executors, for ``executor: ray``: agents in processes of their own, and in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executors.executor_contract import ExecutorContract
from tests.support.ray_cluster import connected


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


class TestRayExecutor(ExecutorContract):
    settings = {"executor": "ray"}  # noqa: RUF012 - read only
