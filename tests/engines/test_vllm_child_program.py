"""Generation in the child process, step by step, with a stand-in for vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hacrl.engines.numbers_as_text import floats_to_text, integers_to_text
from hacrl.engines.vllm import child_program
from hacrl.engines.vllm.child_program import Engine


def output(name: str, ids: list[int], logprobs: list[float], finished: bool = True) -> Any:
    """A ``RequestOutput``: at each position the sampled token's number, then that of the best one."""
    flat = SimpleNamespace(
        logprobs=[number for one in logprobs for number in (one, 0.0)],
        start_indices=[2 * place for place in range(len(logprobs))],
    )
    said = SimpleNamespace(token_ids=ids, logprobs=flat)
    return SimpleNamespace(request_id=name, finished=finished, outputs=[said])


@dataclass
class Played:
    """``vllm.LLM`` and its engine."""

    steps: list[Any] = field(default_factory=list)  # what is said, or raised
    under_way: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    @property
    def llm_engine(self) -> Any:
        return self

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        if prompt is None:
            raise ValueError("refused")
        self.under_way.append(name)
        return f"{name}-inside"

    def has_unfinished_requests(self) -> bool:
        return bool(self.under_way)

    def step(self) -> Any:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        for one in step:
            if one.finished:
                self.under_way.remove(one.request_id)
        return step

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        self.under_way = [name for name in self.under_way if name not in names]

    def collective_rpc(self, method: str, timeout: float) -> list[Any]:
        return [method]


@dataclass
class Connection:
    """A connection on which another message arrives after ``patience`` replies."""

    patience: int = 99
    sent: list[dict[str, Any]] = field(default_factory=list)

    @property
    def received(self) -> Any:
        return SimpleNamespace(empty=lambda: len(self.sent) < self.patience)

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Played]:
    """An engine that takes prompts as they are."""
    played, engine = Played(), Engine.__new__(Engine)
    engine._llm, engine._num_requests, engine._has_failed = played, 0, False
    monkeypatch.setattr(child_program, "_request", lambda prompt, seed, fields: (prompt, seed))
    return engine, played


def ended(place: int, ids: list[int], logprobs: list[float]) -> tuple[int, str, str]:
    return place, integers_to_text(ids), floats_to_text(logprobs)


def test_indices_follow_the_order_of_the_requests(made: tuple[Engine, Played]) -> None:
    """Whoever ends first, and those of several that end together."""
    engine, played = made
    connection = Connection()
    played.steps = [
        [],  # it runs ahead, and has nothing to say yet
        [output("3", [3], [-3.0]), output("1", [1], [-1.0], finished=False)],
        [output("2", [2], [-2.0]), output("1", [1, 4], [-1.0, -4.0])],
    ]
    requests = [["first", {}, [None]], ["second", {}, [None, None]]]
    engine.handle({"do": "generate", "requests": requests, "number": 5}, connection)
    assert connection.sent == [
        {"number": 5, "finished": [ended(2, [3], [-3.0])]},
        {"number": 5, "finished": [ended(1, [2], [-2.0]), ended(0, [1, 4], [-1.0, -4.0])]},
    ]
    assert played.aborted == []


def test_long_steps_show_that_the_engine_is_alive(
    made: tuple[Engine, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, played = made
    clock = iter([0.0, 1.0, 2.5, 2.5, 3.0, 9.0, 9.0])  # the second step and the last one end late
    monkeypatch.setattr(child_program.time, "monotonic", lambda: next(clock))
    connection = Connection()
    played.steps = [[], [], [], [output("1", [3], [-3.0])]]
    engine.handle({"do": "generate", "requests": [["one", {}, [0]]], "number": 5}, connection)
    assert connection.sent == [
        {"number": 5, "finished": []},
        {"number": 5, "finished": [ended(0, [3], [-3.0])]},
    ]


def test_aborted_requests_send_no_responses(made: tuple[Engine, Played]) -> None:
    engine, played = made
    connection = Connection(patience=1)
    played.steps = [[output("2", [2], [-2.0])]]
    engine.handle({"do": "generate", "requests": [["one", {}, [0, 1, 2]]], "number": 1}, connection)
    assert played.aborted == ["1", "3"]
    played.steps = [[output("4", [7], [-7.0])]]
    connection = Connection()
    engine.handle({"do": "generate", "requests": [["one", {}, [0]]], "number": 2}, connection)
    assert connection.sent == [{"number": 2, "finished": [ended(0, [7], [-7.0])]}]


def test_a_refused_request_aborts_those_before_it(made: tuple[Engine, Played]) -> None:
    engine, played = made
    with pytest.raises(ValueError, match="refused"):
        engine.handle(
            {"do": "generate", "requests": [["fine", {}, [0, 1]], [None, {}, [2]]], "number": 1}, Connection()
        )
    assert played.aborted == ["1", "2"]
    assert not engine.is_broken()


def test_a_failed_step_breaks_the_engine_and_aborts_nothing(made: tuple[Engine, Played]) -> None:
    """It cannot be told anything after that, and is to be started again."""
    engine, played = made
    played.steps = [RuntimeError("out of memory")]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.handle({"do": "generate", "requests": [["fine", {}, [0]]], "number": 1}, Connection())
    assert played.aborted == []
    assert engine.is_broken()
