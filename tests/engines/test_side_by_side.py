"""Engines that are asked at the same time."""

from __future__ import annotations

import threading

import pytest

from hacrl.engines.concurrent import answers
from hacrl.types import Problem, Rollout

SECONDS = 20.0  # far more than is needed


def rollout(agent: str, text: str) -> Rollout:
    return Rollout.single_turn(
        problem=Problem("1", "1+1:", "2"),
        agent=agent,
        text=text,
        token_ids=(1,),
        token_logprobs=(-1.0,),
        finish_reason="stop",
        policy_version=0,
        tokenizer="",
    )


SAID = {agent: [rollout(agent, f"{agent} {number}") for number in range(2)] for agent in ("ada", "bob")}


def test_nobody_waits_for_another_to_end() -> None:
    """Each tells of its first response when all have begun, and ends when all have told of one."""
    at_once = threading.Barrier(2, timeout=SECONDS)
    threads: set[int] = set()
    heard: list[tuple[str, int, str]] = []

    def asks(agent: str):
        def question(on_finished, there):
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
    def question(on_finished, there):
        on_finished(0, SAID["ada"][0])
        return [rollout("ada", str(threading.get_ident()))]

    heard = []
    found = answers({"ada": question}, lambda *told: heard.append(told))
    assert found["ada"][0].text == str(threading.get_ident())
    assert heard == [("ada", 0, SAID["ada"][0])]


def test_an_error_of_one_makes_the_others_leave_off() -> None:
    failed = threading.Event()
    heard, left = [], []

    def fails(on_finished, there):
        on_finished(0, SAID["ada"][0])
        failed.set()
        raise ValueError("the engine of ada is gone")

    def goes_on(on_finished, there):
        assert failed.wait(SECONDS)
        try:
            while True:  # sooner or later it is told
                on_finished(0, SAID["bob"][0])
        finally:
            left.append("bob")

    with pytest.raises(ValueError, match="the engine of ada is gone") as raised:
        answers({"ada": fails, "bob": goes_on}, lambda *told: heard.append(told))
    assert heard[0] == ("ada", 0, SAID["ada"][0])
    assert left == ["bob"]
    assert not any(thread.name.startswith("hacrl-ask-") for thread in threading.enumerate())
    assert not hasattr(raised.value, "__notes__")


def test_both_errors_are_told() -> None:
    both = threading.Barrier(2, timeout=SECONDS)

    def fails(on_finished, there):
        both.wait()
        raise ValueError("no memory is left")

    with pytest.raises(ValueError, match="no memory is left") as raised:
        answers({"ada": fails, "bob": fails}, lambda *_: None)
    (note,) = raised.value.__notes__
    assert note in [f"The engine of agent {name!r} failed, too: no memory is left" for name in ("ada", "bob")]


@pytest.mark.parametrize("error", [ValueError("cannot be shown"), KeyboardInterrupt()])
def test_an_error_of_who_is_told_makes_all_leave_off(error: BaseException) -> None:
    def on_finished(*_: object) -> None:
        raise error

    def question(tell, there):
        while True:
            tell(0, SAID["ada"][0])

    with pytest.raises(type(error)):
        answers({"ada": question, "bob": question}, on_finished)
    assert not any(thread.name.startswith("hacrl-ask-") for thread in threading.enumerate())


def test_things_are_done_in_the_asking_thread_and_waited_for() -> None:
    done: list[tuple[str, int]] = []

    def asks(agent: str):
        def question(on_finished, there):
            on_finished(0, SAID[agent][0])
            there(lambda: done.append((agent, threading.get_ident())))
            assert agent in dict(done)
            there(lambda: done.append((agent, threading.get_ident())))
            assert [name for name, _ in done].count(agent) == 2
            return SAID[agent]

        return question

    for agents in (["ada", "bob"], ["ada"]):
        done.clear()
        assert answers({agent: asks(agent) for agent in agents}, lambda *_: None).keys() == set(agents)
        assert sorted(done) == sorted([(agent, threading.get_ident()) for agent in agents] * 2)


@pytest.mark.parametrize("error", [ValueError("nobody is to go on"), KeyboardInterrupt()])
def test_who_waits_for_something_in_the_asking_thread_leaves_off_with_an_error(error: BaseException) -> None:
    """One has something done that fails; the other's comes after it and is never done."""
    has_asked = threading.Event()
    went_on: list[str] = []

    def fail() -> None:
        assert has_asked.wait(SECONDS)
        raise error

    def fails(on_finished, there):
        there(fail)
        went_on.append("ada")

    def waits(on_finished, there):
        has_asked.set()
        there(lambda: None)
        there(lambda: None)
        on_finished(0, SAID["bob"][0])
        while not went_on:  # only an error gets it out of here
            there(lambda: None)

    with pytest.raises(type(error)):
        answers({"ada": fails, "bob": waits}, lambda *_: None)
    assert went_on == []
    assert not any(thread.name.startswith("hacrl-ask-") for thread in threading.enumerate())
