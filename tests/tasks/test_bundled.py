"""Bundled tasks with environments, through the registry and through the pool that a run plays them with."""

from __future__ import annotations

import json
import sys

import pytest

from hacrl.environments.bundled.dungeon import make_dungeon
from hacrl.environments.bundled.sandbox import SandboxUnavailableError
from hacrl.environments.pool import EnvironmentPool
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.types import Problem, ToolCall, Turn
from tests.environments.test_bundled import solution
from tests.tasks.helpers import build, refusal

SMALL = {"size": 30, "test_size": 5}


def call(tool: str, **arguments: object) -> Turn:
    return Turn("assistant", "", (ToolCall(tool, json.dumps(arguments)),))


def play(
    pool: EnvironmentPool, problem: Problem, actions: list[Turn]
) -> tuple[list[str], float | None, bool]:
    """What the environment answers to each action, the reward of the last turn or of the end, and its end."""
    pool.start(0, problem)
    ((_, outcome),) = pool.wait()
    assert not outcome.failure, outcome.failure
    answers, reward, done = [outcome.opening], None, False
    for action in actions:
        assert not done, "the episode is over"
        pool.act(0, action)
        ((_, outcome),) = pool.wait()
        assert not outcome.failure, outcome.failure
        answers += [turn.content for turn in outcome.turns]
        reward, done = outcome.reward, outcome.done
    pool.finish(0)
    ((_, outcome),) = pool.wait()
    assert not outcome.failure, outcome.failure
    return answers, outcome.reward if outcome.reward is not None else reward, done


@pytest.mark.parametrize(
    ("name", "tools"),
    [
        ("calculator", {"calculate", "submit"}),
        pytest.param(
            "python",
            {"run_python", "submit"},
            marks=pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
        ),
        ("dungeon", set()),
        ("sqlite", {"query", "submit"}),
    ],
)
def test_a_bundled_task_is_ready_by_its_name(name: str, tools: set[str]):
    task = build(name, **SMALL)
    assert (task.name, len(task.train), len(task.test)) == (name, 30, 5)
    assert not {one.id for one in task.train} & {one.id for one in task.test}
    assert {tool.name for tool in task.train[0].tools} == tools
    task.self_test()
    task.close()


def test_a_calculator_episode_in_the_pool():
    task = build("calculator", **SMALL)
    problem = task.test[0]
    with task.open_environments() as pool:
        actions = [call("calculate", expression="6 * 7.5"), call("submit", answer=problem.answer)]
        answers, reward, done = play(pool, problem, actions)
        assert answers == ["", "45", "The answer has been submitted."]
        assert (reward, done) == (1.0, True)
        assert play(pool, problem, [call("submit", answer="no")])[1] == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_hostile_code_in_a_python_episode_costs_nothing_but_its_call():
    task = build("python", cpu_seconds=1, memory_mb=256, **SMALL)
    problem = task.test[0]
    with task.open_environments() as pool:
        actions = [
            call("run_python", code="while True: pass"),
            call("run_python", code="import os\nos.kill(os.getppid(), 9)"),
            call("run_python", code="x = ' ' * 10**10"),
            call("run_python", code="open('/etc/passwd')"),
            call("run_python", code="6 * 7"),
            call("submit", answer=problem.answer),
        ]
        answers, reward, done = play(pool, problem, actions)
    assert answers[1] == "[stopped: it used more than 1 s of CPU time]"
    assert "Operation not permitted" in answers[2]
    assert "MemoryError" in answers[3]
    assert "Operation not permitted" in answers[4]
    assert answers[5:] == ["42", "The answer has been submitted."]
    assert (reward, done) == (1.0, True)


def test_a_dungeon_episode_in_the_pool():
    task = build("dungeon", rooms=4, **SMALL)
    problem = task.test[0]
    commands = solution(make_dungeon(problem.fields["seed"], 4))
    with task.open_environments() as pool:
        answers, reward, done = play(pool, problem, [Turn("assistant", command) for command in commands])
    assert answers[0].startswith("You are in the ")
    assert answers[-1] == "You have the treasure."
    assert (reward, done) == (1.0, True)
    assert task.episode_limits.max_turns == max(row.fields["moves"] for row in (*task.train, *task.test))


def test_a_database_episode_in_the_pool():
    task = build("sqlite", **SMALL)
    problem = task.test[0]
    with task.open_environments() as pool:
        actions = [
            call("query", sql="select count(*) as n from sqlite_schema where type = 'table'"),
            call("query", sql="drop table books"),
            call("submit", answer=problem.answer),
        ]
        answers, reward, _ = play(pool, problem, actions)
    assert answers[0].count("CREATE TABLE") == int(answers[1].splitlines()[1])
    assert answers[2].startswith("Error: ")
    assert reward == 1.0


def test_the_written_calculator_asks_the_sums_of_arithmetic():
    task = build("written_calculator")
    sums = ArithmeticTask()
    for split, own in ((task.train, sums.train), (task.test, sums.test)):
        assert {one.prompt for one in split} == {one.prompt for one in own}
    problem = next(one for one in task.test if one.prompt == "(31*2)-13:" or one.answer == "49")
    with task.open_environments() as pool:
        actions = [Turn("assistant", text) for text in ("[31*2]", ";62-12=50;[62-13]", f"#{problem.answer}")]
        assert play(pool, problem, actions) == (["", "62", "49", ""], 1.0, True)
        assert play(pool, problem, [Turn("assistant", "#7")]) == (["", ""], 0.0, True)
        assert play(pool, problem, [Turn("assistant", "[31**2]")]) == (["", "?"], 0.0, True)


def test_wrong_options_are_explained():
    assert refusal("calculator", sise=3).startswith("task.options.sise: unknown option of task 'calculator'")
    assert "did you mean 'max_turns'?" in refusal("calculator", max_turn=3)
    assert refusal("calculator", train="a.jsonl").startswith("task.options.train: unknown option")
    assert refusal("dungeon", rooms=99) == "task.options.rooms=99: must be a whole number from 3 to 16"
    assert refusal("sqlite", databases=0).startswith("task.options.databases=0: must be a whole number")
    assert refusal("python", memory_mb=-1).startswith("task.options.memory_mb=-1: must be a number above 0")
    assert "too few different questions" in refusal("sqlite", databases=1, size=100_000)


def test_a_machine_without_the_sandbox_is_told_so_before_the_run(monkeypatch: pytest.MonkeyPatch):
    def unavailable(*_: object) -> None:
        raise SandboxUnavailableError("OSError: [Errno 38] no system call filter for plan9 on m68k")

    monkeypatch.setattr("hacrl.environments.bundled.sandbox.run_code", unavailable)
    message = refusal("python", **SMALL)
    assert message.startswith("task: Python code cannot be run safely on this machine: OSError")


def test_verifiers_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils.loaders"):
        monkeypatch.setitem(sys.modules, name, None)
    message = refusal("verifiers", taskset="tests.support.verifiers_sums:Sums")
    assert message.endswith("install it with: pip install 'hacrl[verifiers]'")
