"""An engine that is closed by one thread while another one waits for its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import Sample
from hacrl.engines.vllm.backend import EngineLostError, IndexedSamples, Request
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.types import Problem, Sampling
from tests.support.engines import sample_rollouts, take_for_proven
from tests.support.tiny import char_agent

SECONDS = 20.0  # far more than is needed
PROBLEMS = [Problem("1", "1+1:", "2"), Problem("2", "2+2:", "4")]


class Endless:
    """Says one thing and then nothing until it is closed, like a server whose process is ended."""

    name, can_sleep = "engine of ada", False

    def __init__(self) -> None:
        self.starts = 0
        self.is_gone = threading.Event()
        self.has_said = threading.Event()
        self.is_lost = threading.Event()  # never

    def start(self) -> None:
        self.starts += 1

    def generate(self, asks: Sequence[Request]) -> Iterator[IndexedSamples]:
        yield [(0, Sample((5,), (-1.0,)))]
        self.has_said.set()
        assert self.is_gone.wait(SECONDS)
        raise EngineLostError("engine of ada has ended.")

    def close(self) -> None:
        """Takes its time, as servers do; whoever waits for answers sees at once that it is gone."""
        self.is_gone.set()
        self.is_lost.wait(0.5)


def test_it_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Endless()
    engine = VllmEngine(char_agent(), backend, VllmSettings(), [])
    monkeypatch.setattr(engine, "_send_weights", partial(take_for_proven, engine))
    engine.sync()
    errors: list[Exception] = []

    def ask() -> None:
        try:
            sample_rollouts(engine, PROBLEMS, 1, Sampling(4), 0)
        except EngineLostError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert backend.has_said.wait(SECONDS)
    engine.close()
    asking.join(SECONDS)
    assert [str(error) for error in errors] == ["engine of ada has ended."]
    assert (backend.starts, engine.restarts) == (1, 0)
    engine.sync()  # who asks for it again gets it
    assert backend.starts == 2
