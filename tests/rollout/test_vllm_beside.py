"""Engines brought to their policies by several threads: they start in turns, and need none later."""

from __future__ import annotations

import threading

import pytest

from hacrl.agents.engine_settings import VllmSettings
from hacrl.rollout.vllm.backend import EngineLostError
from hacrl.rollout.vllm.engine import VllmEngine
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
    threads = [threading.Thread(target=engine.prepare) for engine in engines]
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
        version = engine.agent.policy_version
        if version == 0 or lost:
            firsts.take()
        else:
            beside.wait()
        if version == 2 and len(lost) < 2:
            lost.append(version)
            beside.wait()  # both are lost at the same time
            raise EngineLostError("an engine died.")
        take_for_proven(engine)

    monkeypatch.setattr(VllmEngine, "_synchronise", synchronise)
    bring_up(engines)
    assert (starts.turns, starts.most, firsts.turns, firsts.most) == (2, 1, 2, 1)
    for engine in engines:
        engine.agent.policy_version = 1
    bring_up(engines)
    assert [engine.prepare().policy_version for engine in engines] == [1, 1]
    for engine in engines:
        engine.agent.policy_version = 2
    bring_up(engines)
    assert [engine.prepare().policy_version for engine in engines] == [2, 2]
    assert [engine.restarts for engine in engines] == [1, 1]
    assert (starts.turns, starts.most, firsts.turns, firsts.most) == (4, 1, 4, 1)
