"""Engines that are asked at the same time."""

from __future__ import annotations

import threading

import pytest

from hacrl.rollout.side_by_side import answers
from hacrl.types import Problem, Rollout

SECONDS = 20.0  # far more than is needed


def rollout(agent: str, text: str) -> Rollout:
    return Rollout(
        problem=Problem("1", "1+1:", "2"),
        agent=agent,
        text=text,
        token_ids=(1,),
        token_logprobs=(-1.0,),
        finish_reason="stop",
        policy_version=0,
    )


SAID = {agent: [rollout(agent, f"{agent} {number}") for number in range(2)] for agent in ("ada", "bob")}


def test_nobody_waits_for_another_to_end() -> None:
    """Each tells of its first response when all have begun, and ends when all have told of one."""
    at_once = threading.Barrier(2, timeout=SECONDS)
    threads: set[int] = set()
    heard: list[tuple[str, int, str]] = []

    def asks(agent: str):
        def question(on_finished):
            threads.add(threading.get_ident())
            at_once.wait()
            on_finished(1, SAID[agent][1])
            at_once.wait()
            on_finished(0, SAID[agent][0])
            return SAID[agent]

        return question

    def on_finished(agent: str, place: int, said: Rollout) -> None:
        assert threading.get_ident() not in threads  # whoever watches is told by one thread
        heard.append((agent, place, said.text))

    found = answers({agent: asks(agent) for agent in SAID}, on_finished)
    assert found == SAID
    assert list(found) == ["ada", "bob"]
    assert sorted(heard[:2]) == [("ada", 1, "ada 1"), ("bob", 1, "bob 1")]
    assert sorted(heard[2:]) == [("ada", 0, "ada 0"), ("bob", 0, "bob 0")]
    assert len(threads) == 2


def test_one_alone_is_asked_in_the_callers_thread() -> None:
    def question(on_finished):
        on_finished(0, SAID["ada"][0])
        return [rollout("ada", str(threading.get_ident()))]

    heard = []
    found = answers({"ada": question}, lambda *told: heard.append(told))
    assert found["ada"][0].text == str(threading.get_ident())
    assert heard == [("ada", 0, SAID["ada"][0])]


def test_an_error_is_raised_when_the_others_have_answered() -> None:
    failed = threading.Event()
    heard = []

    def fails(on_finished):
        failed.set()
        raise ValueError("the engine of ada is gone")

    def goes_on(on_finished):
        assert failed.wait(SECONDS)
        on_finished(0, SAID["bob"][0])
        return SAID["bob"]

    with pytest.raises(ValueError, match="the engine of ada is gone"):
        answers({"ada": fails, "bob": goes_on}, lambda *told: heard.append(told))
    assert heard == [("bob", 0, SAID["bob"][0])]


def test_an_error_of_who_is_told_is_not_lost() -> None:
    def on_finished(*_: object) -> None:
        raise ValueError("cannot be shown")

    def question(tell):
        tell(0, SAID["ada"][0])
        return SAID["ada"]

    with pytest.raises(ValueError, match="cannot be shown"):
        answers({"ada": question, "bob": question}, on_finished)
