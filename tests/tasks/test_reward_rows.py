"""Ids and order of rows whose columns hold more than JSON knows."""

from __future__ import annotations

import os
import subprocess
import sys

from hacrl.tasks.rewards import RewardTask

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
    rows = [{"prompt": "Say seven.", "checker": object()} for _ in range(3)]
    task = RewardTask(functions=lambda completions, **_: [0.0] * len(completions), train=rows)
    assert len({one.id for one in task.train}) == 3
    assert [one.fields["checker"] in [row["checker"] for row in rows] for one in task.train] == [True] * 3
