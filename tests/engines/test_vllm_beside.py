"""Engines brought to their policies by several threads: they start in turns, and need none later."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hacrl.config.schema import VllmSettings
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm.backend import EngineLostError
from hacrl.engines.vllm.engine import VllmEngine
from tests.support.engines import take_for_proven
from tests.support.tiny import char_agent

SECONDS = 20.0  # far more than is needed
BRIEFLY = 0.2  # in which one that does not wait for its turn would come


class Turns:
    """Counts who is at something at the same time."""

    def __init__(self) -> None:
        self.most = 0
        self.turns = 0
        self._now = 0
        self._lock = threading.Lock()

    def take(self) -> None:
        with self._lock:
            self._now += 1
            self.turns += 1
            self.most = max(self.most, self._now)
        threading.Event().wait(BRIEFLY)
        with self._lock:
            self._now -= 1


class Startable:
    """Nothing but starts."""

    name, can_sleep = "an engine", False

    def __init__(self, turns: Turns) -> None:
        self.start = turns.take


def bring_up(engines: list[VllmEngine]) -> None:
    threads = [threading.Thread(target=engine.sync) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_starts_come_one_by_one_and_all_else_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, firsts = Turns(), Turns()
    beside = threading.Barrier(2, timeout=SECONDS)
    lost: list[int] = []
    engines = [
        VllmEngine(char_agent(), Startable(starts), VllmSettings(), [], before_start=beside.wait)
        for _ in range(2)
    ]

    def synchronise(engine: VllmEngine) -> None:
        version = engine.policy.policy_version
        if version == 0 or lost:
            firsts.take()
        else:
            beside.wait()
        if version == 2 and len(lost) < 2:
            lost.append(version)
            beside.wait()  # both are lost at the same time
            raise EngineLostError("an engine died.")
        take_for_proven(engine)

    monkeypatch.setattr(VllmEngine, "_send_weights", synchronise)
    bring_up(engines)
    assert (starts.turns, starts.most, firsts.turns, firsts.most) == (2, 1, 2, 1)
    for engine in engines:
        engine.policy.policy_version = 1
    bring_up(engines)
    assert [engine.sync().policy_version for engine in engines] == [1, 1]
    for engine in engines:
        engine.policy.policy_version = 2
    bring_up(engines)
    assert [engine.sync().policy_version for engine in engines] == [2, 2]
    assert [engine.restarts for engine in engines] == [1, 1]
    assert (starts.turns, starts.most, firsts.turns, firsts.most) == (4, 1, 4, 1)


def test_engines_that_measure_nothing_start_side_by_side_but_not_beside_one_that_does(monkeypatch) -> None:
    monkeypatch.setattr(VllmEngine, "_send_weights", take_for_proven)
    go, waits = threading.Event(), threading.Event()
    backends = [Slow(go), Slow(go), Slow()]
    engines = [
        VllmEngine(char_agent(), backends[0], VllmSettings(), [], starts_alone=False),
        VllmEngine(char_agent(), backends[1], VllmSettings(), [], starts_alone=False),
        VllmEngine(char_agent(), backends[2], VllmSettings(), [], before_start=waits.set),
    ]
    threads = [threading.Thread(target=engine.sync) for engine in engines]
    for thread, backend in zip(threads[:2], backends[:2], strict=True):
        thread.start()
        assert backend.is_starting.wait(SECONDS)  # and none of them has ended
    threads[2].start()
    assert waits.wait(SECONDS)
    assert not backends[2].is_starting.wait(BRIEFLY)
    go.set()
    assert backends[2].is_starting.wait(SECONDS)
    for thread in threads:
        thread.join(SECONDS)
    assert [backend.starts for backend in backends] == [1, 1, 1]


def test_nobody_starts_beside_one_that_measures(monkeypatch) -> None:
    monkeypatch.setattr(VllmEngine, "_send_weights", take_for_proven)
    go, waits = threading.Event(), threading.Event()
    first, second = Slow(go), Slow()
    engines = [
        VllmEngine(char_agent(), first, VllmSettings(), []),
        VllmEngine(char_agent(), second, VllmSettings(), [], before_start=waits.set, starts_alone=False),
    ]
    threads = [threading.Thread(target=engine.sync) for engine in engines]
    threads[0].start()
    assert first.is_starting.wait(SECONDS)
    threads[1].start()
    assert waits.wait(SECONDS)
    assert not second.is_starting.wait(BRIEFLY)
    go.set()
    assert second.is_starting.wait(SECONDS)
    for thread in threads:
        thread.join(SECONDS)


class Slow:
    """Starts when it may."""

    name, can_sleep = "an engine", False

    def __init__(self, may_start: threading.Event | None = None) -> None:
        self.starts, self.is_starting, self._may_start = 0, threading.Event(), may_start

    def start(self) -> None:
        self.starts += 1
        self.is_starting.set()
        assert self._may_start is None or self._may_start.wait(SECONDS)

    def close(self) -> None:
        """Nothing is held."""


def test_one_that_is_closed_while_it_waits_for_its_turn_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmEngine, "_send_weights", take_for_proven)
    go, waits = threading.Event(), threading.Event()
    first, second = Slow(go), Slow()
    engines = [
        VllmEngine(char_agent(), first, VllmSettings(), []),
        VllmEngine(char_agent(), second, VllmSettings(), [], before_start=waits.set),
    ]
    errors: list[str] = []

    def prepare(engine: VllmEngine) -> None:
        try:
            engine.sync()
        except EngineError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=prepare, args=(engine,)) for engine in engines]
    threads[0].start()
    assert first.is_starting.wait(SECONDS)
    threads[1].start()
    assert waits.wait(SECONDS)
    engines[1].close()
    go.set()
    for thread in threads:
        thread.join(SECONDS)
    assert (first.starts, second.starts, errors) == (1, 0, ["an engine was closed"])


def test_nobody_answers_while_another_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures how much memory is free."""
    monkeypatch.setattr(VllmEngine, "_send_weights", take_for_proven)
    go = threading.Event()
    first, second = Slow(), Slow(go)
    engines = [VllmEngine(char_agent(), backend, VllmSettings(), []) for backend in (first, second)]
    engines[0].sync()
    threads = [threading.Thread(target=engine.sync) for engine in reversed(engines)]
    threads[0].start()
    assert second.is_starting.wait(SECONDS)
    threads[1].start()
    threads[1].join(BRIEFLY)
    assert threads[1].is_alive()  # it is ready, and waits
    go.set()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_a_learner_gives_back_what_it_keeps_for_later_before_an_engine_starts(monkeypatch) -> None:
    """Also one that died or was closed after learning: it measures what is free."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    monkeypatch.setattr("hacrl.engines.vllm.engine.current_device", lambda _: nullcontext())
    monkeypatch.setattr(VllmEngine, "_send_weights", take_for_proven)
    for device, expected in (("cuda:0", ["given back", "start"]), ("cpu", ["start"])):
        done.clear()
        agent = SimpleNamespace(name="ada", device=torch.device(device), policy_version=0)
        backend = SimpleNamespace(
            name="an engine", can_sleep=False, start=lambda: done.append("start"), close=lambda: None
        )
        engine = VllmEngine(agent, backend, VllmSettings(), [])
        engine.sync()
        assert done == expected
        engine.close()
        engine.sync()
        assert done == expected * 2
