"""Ids and order of rows whose columns hold more than JSON knows."""

from __future__ import annotations

import os
import subprocess
import sys

from hacrl.tasks.rewards import RewardTask
from tests.tasks.helpers import rollout_of

SCRIPT = """
from hacrl.tasks.rewards import RewardTask
class Checker:  # its repr has an address
    pass
rows = [{"prompt": f"{i} + 1", "checker": Checker(), "words": {"one", "two", "three"}} for i in range(6)]
waste = [object() for _ in range(%d)]
task = RewardTask(functions=lambda completions, **_: [0.0], train=rows)
print([(one.prompt, one.id) for one in task.train])
"""


def test_equal_data_has_equal_ids_and_order_in_every_process():
    def told(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", SCRIPT % (seed * 1000)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert told(1) == told(2)


def test_rows_that_differ_in_an_object_only_are_all_kept():
    rows = [{"prompt": "Say seven.", "level": 3, "checker": object(), "pair": (1, 2)} for _ in range(3)]
    given = []

    def reward(completions, level, checker, pair, **_):
        given.extend(zip(level, checker, pair, strict=True))
        return [0.0] * len(completions)

    task = RewardTask(functions=reward, train=rows)
    assert len({one.id for one in task.train}) == 3
    # fields hold plain JSON only; the function gets every column as it was given
    assert [one.fields for one in task.train] == [{"level": 3}] * 3
    task.verify([rollout_of(one, "7") for one in task.train])
    assert {id(checker) for _, checker, _ in given} == {id(row["checker"]) for row in rows}
    assert [(level, pair) for level, _, pair in given] == [(3, (1, 2))] * 3
