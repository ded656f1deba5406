"""The contract of executors, for ``executor: local``."""

from __future__ import annotations

from tests.executors.executor_contract import ExecutorContract


class TestLocalExecutor(ExecutorContract):
    settings = {"executor": "local"}  # noqa: RUF012 - read only
