"""Async reward functions that do not come to an end."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import warnings

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.event_loop import LoopThread
from hacrl.tasks.rewards import RewardTask
from tests.tasks.saying import says

ROWS = [{"prompt": "What is 2+2?"}]


def test_an_interrupted_call_is_cancelled_and_close_does_not_wait_for_it():
    ended = []

    async def silent_server():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # Ctrl-C while it waits
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    loop = LoopThread()
    with pytest.raises(KeyboardInterrupt):
        loop.gather([silent_server()])
    closing = threading.Thread(target=loop.close, daemon=True)
    closing.start()
    closing.join(timeout=60)  # guards against a hang
    assert not closing.is_alive()
    assert ended == ["cancelled"]


def test_a_coroutine_is_not_left_behind_by_another_function_that_raises():
    async def late(completions, **_):
        return [0.0] * len(completions)

    def broken(completions, **_):
        raise KeyError("oops")

    task = RewardTask(functions=[late, broken], train=ROWS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TaskError, match="'broken' raised KeyError"):
            task.verify([says(task.train[0], "4")])
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    task.close()
