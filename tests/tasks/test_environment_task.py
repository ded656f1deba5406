"""The ``environment`` task: its rows, rewards and verdicts, and what it refuses before models load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hacrl.config.schema import TaskSettings
from hacrl.environments.interface import EnvironmentLimits
from hacrl.errors import TaskError
from hacrl.tasks.environment import EnvironmentTask
from hacrl.tasks.episodes import EpisodeLimits, PlaysEpisodes
from hacrl.tasks.registry import make_task
from hacrl.types import Episode, Problem, Rollout, Segment, ToolCall, Turn
from tests.support.episode_environments import reference

ROWS = [{"prompt": f"Number {n}.", "hidden": n} for n in range(4)]


def task_of(name: str = "GuessByTool", **options: Any) -> EnvironmentTask:
    return EnvironmentTask(**{"environment": reference(name), "train": ROWS, **options})


def episode_of(problem: Problem, reward: float | None, **changes: Any) -> Rollout:
    """Guess 3, hear "+", and give up."""
    segments = (
        Segment("action", "g", (4, 1), (-1.0, -1.0), turns=(guess(3),), finish_reason="stop"),
        Segment("observation", "o", (5,), turns=(Turn("tool", "+", tool="guess"),)),
        Segment("action", "x", (6,), (-1.0,), turns=(Turn("assistant", "x"),), finish_reason="length"),
    )
    episode = Episode("answered", "d", " Go.", reward=reward)
    one = Rollout(problem, "ada", segments, "length", 0, "t", episode=episode)
    return replace(one, episode=replace(episode, **changes))


def guess(number: int) -> Turn:
    return Turn("assistant", "", (ToolCall("guess", f'{{"number": {number}}}'),))


def test_problems_have_the_tools_of_their_environment() -> None:
    rows = [{**row, "environment": "tool" if row["hidden"] % 2 else "text"} for row in ROWS]
    environments = {"tool": reference("GuessByTool"), "text": reference("GuessInText")}
    task = task_of(environment=environments, train=rows, system="Be brief.")
    assert isinstance(task, PlaysEpisodes)
    found = {problem.fields["hidden"]: problem for problem in task.train}
    assert sorted(found) == [0, 1, 2, 3]
    for hidden, problem in found.items():
        assert problem.environment == ("tool" if hidden % 2 else "text")
        assert [tool.name for tool in problem.tools] == (["guess"] if hidden % 2 else [])
        assert problem.fields == {"hidden": hidden}  # the name of the environment is no argument of reset
        assert problem.context == (Turn("system", "Be brief."),)
        assert problem.prompt == f"Number {hidden}."
    single = task_of().train[0]
    assert single.environment == ""
    assert single.tools[0].description == "Guess the digit."


def test_rows_need_no_prompt() -> None:
    task = task_of(train=[{"hidden": n} for n in range(20)], test_share=0.3)
    assert {problem.prompt for problem in (*task.train, *task.test)} == {""}
    assert len(task.train) + len(task.test) == 20
    assert 0 < len(task.test) < 20
    assert len({problem.id for problem in (*task.train, *task.test)}) == 20


def test_rows_with_one_prompt_are_held_out_by_what_reset_gets(tmp_path: Path) -> None:
    (tmp_path / "lock.py").write_text(
        "class Lock:\n"
        "    def reset(self, code, **row): ...\n"
        "    def get_reward(self): return 0.0\n"
        "class Any(Lock):\n"
        "    def reset(self, **row): ...\n"
    )
    # two rows for each of 50 codes, which differ in their number alone
    rows = [{"prompt": "Open it.", "code": str(number // 2), "row": number} for number in range(100)]
    for name, repeated in (("Lock", True), ("Any", False)):
        task = EnvironmentTask(environment=f"{tmp_path}/lock.py:{name}", train=rows, test_share=0.3)
        train, test = ({problem.fields["code"] for problem in part} for part in (task.train, task.test))
        assert 5 < len(test) < 50
        assert train.isdisjoint(test) is repeated  # a reset that names no column may read each of them
        task.close()


def test_verdicts_of_whole_and_failed_episodes() -> None:
    task = task_of()
    problem = task.train[0]
    rollouts = [
        episode_of(problem, 0.25),
        episode_of(problem, None, end="failed", failure="died", failure_kind="crash"),
        episode_of(problem, None, end="failed", failure="hangs", failure_kind="timeout"),
        episode_of(problem, 1.0),
    ]
    found = task.verify(rollouts)
    assert [(one.label, one.reward) for one in found] == [
        ("scored", 0.25),
        ("crash", 0.0),
        ("timeout", 0.0),
        ("scored", 1.0),
    ]
    assert found[0].rewards == {"environment": 0.25}
    assert task.verify([]) == []


def test_reward_functions_see_the_conversation() -> None:
    seen: dict[str, Any] = {}

    def calls(prompts: list[Any], completions: list[Any], hidden: list[int], **_: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, hidden=hidden)
        return [float(len(messages)) for messages in completions]

    task = task_of(functions=calls, weights=[0.5])
    problem = next(problem for problem in task.train if problem.fields["hidden"] == 2)
    failed = episode_of(problem, None, end="failed", failure="died", failure_kind="crash")
    (first, second) = task.verify([episode_of(problem, 0.25), failed])
    # three messages, weighed with 0.5, and the environment's own reward with 1: 1.5 + 0.25
    assert (first.reward, first.rewards) == (1.75, {"calls": 3.0, "environment": 0.25})
    assert second.reward == 0.0
    assert seen["hidden"] == [2]  # failed episodes are not judged
    assert seen["prompts"] == [[{"role": "user", "content": "Number 2. Go."}]]
    called = {"type": "function", "function": {"name": "guess", "arguments": {"number": 3}}}
    assert seen["completions"] == [
        [
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "content": "+", "name": "guess"},
            {"role": "assistant", "content": "x"},
        ]
    ]


def test_an_environment_without_a_reward_needs_functions() -> None:
    with pytest.raises(TaskError, match=r"environment: has no get_reward, .* or give functions"):
        task_of("Judged")
    task = task_of("Judged", functions=lambda completions, **_: [1.0] * len(completions))
    (verdict,) = task.verify([episode_of(task.train[0], None)])
    assert verdict.reward == 1.0
    assert len(verdict.rewards) == 1


@contextmanager
def refused(words: str) -> Iterator[None]:
    with pytest.raises(TaskError, match=words):
        yield


def test_wrong_options_are_refused() -> None:
    rows = [{**row, "environment": "txet"} for row in ROWS]
    environments = {"tool": reference("GuessByTool"), "text": reference("GuessInText")}
    with refused(r"train: the rows given, row 1: column 'environment' is 'txet'; did you mean 'text'\?"):
        task_of(environment=environments, train=rows)
    with refused(r"column 'environment' is None; name one of tool, text"):
        task_of(environment=environments)
    with refused(r"train: the rows given: has no column 'hidden', which reset of environment needs"):
        task_of(train=[{"prompt": "x"}])
    with refused(r"environment: is empty"):
        task_of(environment={})
    with refused(r"environment\.factory_: unknown key; it takes factory, options"):
        task_of(environment={"factory": reference("GuessByTool"), "factory_": 1})
    with refused(r"environment\.a: must be a class or a reference"):
        task_of(environment={"a": 3})
    with refused(r"has no 'GuessByTol'; did you mean 'GuessByTool'"):
        task_of("GuessByTol")
    with refused(r"max_turns=0: must be a whole number of at least 1"):
        task_of(max_turns=0)
    with refused(r"max_turn_tokens=1.5: must be a whole number"):
        task_of(max_turn_tokens=1.5)
    with refused(r"max_seconds=-1: must be a positive number"):
        task_of(max_seconds=-1)
    with refused(r"limits\.call_second: unknown key; did you mean 'call_seconds'\?"):
        task_of(limits={"call_second": 3})
    with refused(r"limits: call_seconds must be a positive number, not 0"):
        task_of(limits={"call_seconds": 0})
    with refused(r"task\.options\.environment: has no get_reward"):
        options = {"environment": reference("Judged"), "train": ROWS}
        make_task(TaskSettings(name="environment", options=options))
    with refused(r"task\.options\.max_turn: unknown option of task 'environment'; did you mean 'max_turns'"):
        make_task(TaskSettings(name="environment", options={"max_turn": 3}))


def test_limits_reach_the_pool() -> None:
    task = task_of(max_turns=3, max_turn_tokens=5, max_seconds=9, limits={"call_seconds": 2.5})
    assert task.episode_limits == EpisodeLimits(3, 5, 9)
    assert task.open_environments().limits == EnvironmentLimits(call_seconds=2.5)


def test_values_that_reset_does_not_get_are_noted() -> None:
    task = task_of(train=[{**row, "image": object()} for row in ROWS])
    (note,) = task.notes
    assert note.startswith("reset does not get the column image")


def test_self_test_plays_the_ends_of_an_episode_of_each_environment() -> None:
    task_of().self_test()
    fragile = {"tool": reference("GuessByTool"), "frail": reference("Fragile")}
    rows = [
        {"prompt": "a", "hidden": 1, "environment": "tool"},
        {"prompt": "b", "hidden": 1, "fault": "reset", "environment": "frail"},
    ]
    with refused(r"environment\.frail: reset failed .*RuntimeError: there is no such level"):
        task_of(environment=fragile, train=rows).self_test()
    rows[1]["fault"] = "step"  # which a test without an agent cannot see
    task_of(environment=fragile, train=rows).self_test()
