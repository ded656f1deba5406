"""Async reward functions beside one that fails."""

from __future__ import annotations

import gc
import warnings

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.rewards import RewardTask
from tests.tasks.helpers import rollout_of

ROWS = [{"prompt": "What is 2+2?"}]


def test_a_coroutine_is_closed_if_another_function_raises():
    async def late(completions, **_):
        return [0.0] * len(completions)

    def broken(completions, **_):
        raise KeyError("oops")

    task = RewardTask(functions=[late, broken], train=ROWS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TaskError, match="'broken' raised KeyError"):
            task.verify([rollout_of(task.train[0], "4")])
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    task.close()
