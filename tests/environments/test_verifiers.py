"""Tasksets of verifiers v1 in the text form, with the real package."""

from __future__ import annotations

import asyncio

import pytest

from hacrl.errors import TaskError

pytest.importorskip("verifiers.v1", reason="verifiers is not installed (pip install 'hacrl[verifiers]')")

from hacrl.environments.adapters.verifiers import VerifiersTask, taskset_rows
from hacrl.types import Turn
from tests.tasks.helpers import build
from tests.tasks.test_bundled import play

MODULE = "tests.support.verifiers_sums"


def judge(row: dict, text: str, **config) -> float:
    environment = VerifiersTask(f"{MODULE}:Sums", config)
    assert environment.reset(**row) == ""
    observation, reward, done = asyncio.run(environment.step(text))
    assert (observation, done) == ("", True)
    return reward


def test_tasks_become_rows_and_rewards_are_weighted():
    rows = taskset_rows(f"{MODULE}:Sums", {"size": 3})
    assert [row["prompt"] for row in rows] == ["0 + 10 =", "1 + 10 =", "2 + 10 ="]
    assert [row["task"]["answer"] for row in rows] == [10, 11, 12]
    assert judge(rows[1], "11") == 2.0 * 1 + 0.5 * 1
    assert judge(rows[1], "eleven") == 0.0
    assert judge(rows[1], "12") == 0.5  # wrong, but brief
    assert judge(rows[2], "12") == 2.5


def test_a_system_prompt_makes_a_conversation():
    rows = taskset_rows(f"{MODULE}:Sums", {"size": 1, "instruction": "Be brief."})
    assert rows[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "0 + 10 ="},
    ]
    assert judge(rows[0], "10") == 2.5


def test_rows_are_plain_json():
    import json

    rows = taskset_rows(f"{MODULE}:Sums", {"size": 2})
    assert json.loads(json.dumps(rows)) == rows


def test_an_endless_taskset_needs_a_limit():
    with pytest.raises(TaskError, match="never ends; give the number"):
        taskset_rows(f"{MODULE}:EndlessSums")
    assert len(taskset_rows(f"{MODULE}:EndlessSums", limit=4)) == 4


@pytest.mark.parametrize(
    ("taskset", "reason"),
    [
        ("Boxed", "need a container"),
        ("Prepared", "have a method setup"),
        ("Run", "the reward tests_pass .* needs verifiers' runtime"),
    ],
)
def test_what_needs_verifiers_own_runtime_is_refused(taskset: str, reason: str):
    with pytest.raises(TaskError, match=reason):
        taskset_rows(f"{MODULE}:{taskset}")


def test_wrong_settings_and_unknown_tasksets_are_errors():
    with pytest.raises(TaskError, match=r"config: .* refuses \{'sise': 3\}"):
        taskset_rows(f"{MODULE}:Sums", {"sise": 3})
    with pytest.raises(TaskError, match="'no-such-taskset' cannot be loaded"):
        taskset_rows("no-such-taskset")


def test_the_task_plays_in_the_pool_as_in_a_run():
    task = build("verifiers", taskset=f"{MODULE}:Sums", config={"size": 40})
    assert (task.name, task.episode_limits.max_turns) == ("verifiers", 1)
    assert task.test
    assert len(task.train) + len(task.test) == 40
    problem = task.test[0]
    answer = str(problem.fields["task"]["answer"])
    with task.open_environments() as pool:
        assert play(pool, problem, [Turn("assistant", answer)]) == (["", ""], 2.5, True)
