"""Engines that generate at the same time, and the one thread that others watch."""

from __future__ import annotations

import threading

import pytest

from hacrl.engines.concurrent import MainThread, run_concurrently

SECONDS = 20.0  # far more than is needed
NAMES = ("ada", "bob")


def generating_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("hacrl-generate-")]


def test_jobs_run_at_the_same_time_and_post_to_one_thread() -> None:
    """Each job posts its first action when both have begun, and ends when both have posted one."""
    both = threading.Barrier(2, timeout=SECONDS)
    threads: set[int] = set()
    posted: list[tuple[str, int]] = []

    def job_of(name: str):
        def note(number: int) -> None:
            assert threading.get_ident() not in threads
            posted.append((name, number))

        def job(main: MainThread) -> str:
            threads.add(threading.get_ident())
            both.wait()
            main.post(lambda: note(1))
            both.wait()
            main.post(lambda: note(2))
            return name.upper()

        return job

    assert run_concurrently({name: job_of(name) for name in NAMES}) == {"ada": "ADA", "bob": "BOB"}
    assert sorted(posted[:2]) == [("ada", 1), ("bob", 1)]
    assert sorted(posted[2:]) == [("ada", 2), ("bob", 2)]
    assert len(threads) == 2


def test_a_single_job_runs_in_the_callers_thread() -> None:
    posted = []

    def job(main: MainThread) -> int:
        main.post(lambda: posted.append(1))
        main.call(lambda: posted.append(2))
        return threading.get_ident()

    assert run_concurrently({"ada": job}) == {"ada": threading.get_ident()}
    assert posted == [1, 2]


def test_an_error_of_one_job_stops_the_others() -> None:
    failed = threading.Event()
    stopped = []

    def fails(main: MainThread) -> None:
        failed.set()
        raise ValueError("the engine of ada is gone")

    def goes_on(main: MainThread) -> None:
        assert failed.wait(SECONDS)
        try:
            while True:  # sooner or later post() raises
                main.post(lambda: None)
        finally:
            stopped.append("bob")

    with pytest.raises(ValueError, match="the engine of ada is gone") as raised:
        run_concurrently({"ada": fails, "bob": goes_on})
    assert stopped == ["bob"]
    assert generating_threads() == []
    assert not hasattr(raised.value, "__notes__")


def test_a_second_error_is_added_as_a_note() -> None:
    both = threading.Barrier(2, timeout=SECONDS)

    def fails(main: MainThread) -> None:
        both.wait()
        raise ValueError("no memory is left")

    with pytest.raises(ValueError, match="no memory is left") as raised:
        run_concurrently({"ada": fails, "bob": fails})
    (note,) = raised.value.__notes__
    assert note in [f"The engine of agent {name!r} failed, too: no memory is left" for name in NAMES]


@pytest.mark.parametrize("error", [ValueError("cannot be shown"), KeyboardInterrupt()])
def test_an_error_of_an_action_stops_all_jobs(error: BaseException) -> None:
    def fail() -> None:
        raise error

    def job(main: MainThread) -> None:
        while True:
            main.post(fail)

    with pytest.raises(type(error)):
        run_concurrently({"ada": job, "bob": job})
    assert generating_threads() == []


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_a_called_action_has_run_when_call_returns(names: tuple[str, ...]) -> None:
    done: list[tuple[str, int]] = []

    def job_of(name: str):
        def job(main: MainThread) -> None:
            main.call(lambda: done.append((name, threading.get_ident())))
            assert name in dict(done)
            main.call(lambda: done.append((name, threading.get_ident())))
            assert [other for other, _ in done].count(name) == 2

        return job

    assert run_concurrently({name: job_of(name) for name in names}).keys() == set(names)
    assert sorted(done) == sorted([(name, threading.get_ident()) for name in names] * 2)


@pytest.mark.parametrize("error", [ValueError("nobody is to go on"), KeyboardInterrupt()])
def test_a_job_that_waits_for_its_action_stops_with_an_error(error: BaseException) -> None:
    """One job's action fails; the other job's action comes after it and never runs."""
    has_called = threading.Event()
    went_on: list[str] = []

    def fail() -> None:
        assert has_called.wait(SECONDS)
        raise error

    def fails(main: MainThread) -> None:
        main.call(fail)
        went_on.append("ada")

    def waits(main: MainThread) -> None:
        has_called.set()
        while not went_on:  # only an error gets it out of here
            main.call(lambda: None)

    with pytest.raises(type(error)):
        run_concurrently({"ada": fails, "bob": waits})
    assert went_on == []
    assert generating_threads() == []
