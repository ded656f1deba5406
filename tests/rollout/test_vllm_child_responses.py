"""Responses put together from what vLLM's engine says step by step; vLLM itself is played here."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hacrl.rollout.vllm.child_program import Engine
from hacrl.rollout.vllm.child_responses import Response, Responses


def output(name: str, ids: list[int], logprobs: list[float] | None, reason: str | None = None) -> Any:
    """What the engine says of one response in a step: the sampled token's number and that of the best one."""
    table = None if logprobs is None else np.array([[one, 0.0] for one in logprobs], np.float32)
    said = None if table is None else SimpleNamespace(logprobs=table)
    return SimpleNamespace(request_id=name, new_token_ids=ids, new_logprobs=said, finish_reason=reason)


@dataclass
class Played:
    """``vllm.LLM``, its engine, and the parts of it that are asked."""

    steps: list[Any] = field(default_factory=list)  # what is said, or raised
    asked: list[str] = field(default_factory=list)
    told: list[list[str]] = field(default_factory=list)  # the output processor
    aborted: list[str] = field(default_factory=list)

    @property
    def llm_engine(self) -> Any:
        return self

    engine_core = output_processor = llm_engine

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        if prompt is None:
            raise ValueError("refused")
        self.asked.append(f"{name}-inside")
        return self.asked[-1]

    def get_output(self) -> Any:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return SimpleNamespace(outputs=step)

    def process_outputs(self, outputs: list[Any]) -> None:
        self.told.append([one.request_id for one in outputs])

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert internal
        self.aborted += names


def test_tokens_and_their_numbers_are_put_together() -> None:
    """Several tokens at a time, all in one step, an end without a token, an end beside others that go on."""
    engine = Played()
    responses = Responses(engine)
    a, b, c = (responses.ask("prompt", "params") for _ in range(3))
    assert (a, b, c) == ("1-inside", "2-inside", "3-inside")
    ids = [7]
    engine.steps = [
        [],  # it runs ahead, and has nothing to say yet
        [output(b, ids, [-0.5]), output(a, [1], [-1.0]), output(c, [9], [-9.0], "length")],
        [output(a, [2, 3], [-2.0, -3.0]), output(b, [8], [-0.25], "stop")],
        [output(a, [], None, "abort")],
    ]
    assert responses.step() == {}
    assert responses.step() == {c: Response([9], [-9.0])}
    assert responses.step() == {b: Response([7, 8], [-0.5, -0.25])}
    assert ids == [7]  # it is vLLM's
    assert responses.are_under_way()
    assert responses.step() == {a: Response([1, 2, 3], [-1.0, -2.0, -3.0])}
    assert not responses.are_under_way()
    assert engine.told == [[c], [b], [a]]  # each once, when it has ended


def test_what_was_left_is_never_heard_of_again() -> None:
    engine = Played()
    responses = Responses(engine)
    old = responses.ask("prompt", "params")
    responses.leave()
    assert engine.aborted == [old]
    assert not responses.are_under_way()
    new = responses.ask("prompt", "params")
    engine.steps = [[output(old, [1], [-1.0], "length"), output(new, [2], [-2.0], "length")]]
    assert responses.step() == {new: Response([2], [-2.0])}
    assert engine.told == [[new]]


class Line:
    """Nobody asks for anything else."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.told = SimpleNamespace(empty=lambda: True)

    def say(self, what: dict[str, Any]) -> None:
        self.said.append(what)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Played]:
    """An engine that takes prompts as they are."""
    from hacrl.rollout.vllm import child_program

    played, engine = Played(), Engine.__new__(Engine)
    engine._llm, engine._responses, engine._has_failed = played, Responses(played), False
    monkeypatch.setattr(child_program, "_request", lambda prompt, seed, fields: (prompt, seed))
    monkeypatch.setattr(child_program, "_said", lambda one: (one.token_ids, one.logprobs))
    return engine, played


def test_places_are_those_of_the_order_asked_in(made: tuple[Engine, Played]) -> None:
    """Whoever ends first, and those of several that end together."""
    engine, played = made
    line = Line()
    played.steps = [
        [output("3-inside", [3], [-3.0], "length"), output("1-inside", [1], [-1.0])],
        [output("2-inside", [2], [-2.0], "stop"), output("1-inside", [4], [-4.0], "length")],
    ]
    asks = [["first", {}, [None]], ["second", {}, [None, None]]]
    engine.do({"do": "generate", "asks": asks, "number": 5}, line)
    assert line.said == [
        {"number": 5, "ended": [(2, [3], [-3.0])]},
        {"number": 5, "ended": [(1, [2], [-2.0]), (0, [1, 4], [-1.0, -4.0])]},
    ]
    assert played.aborted == []


def test_one_that_is_refused_takes_those_before_it_along(made: tuple[Engine, Played]) -> None:
    engine, played = made
    with pytest.raises(ValueError, match="refused"):
        engine.do({"do": "generate", "asks": [["fine", {}, [0, 1]], [None, {}, [2]]], "number": 1}, Line())
    assert played.aborted == ["1-inside", "2-inside"]
    assert not engine.is_broken()


def test_a_step_that_fails_leaves_vllm_alone(made: tuple[Engine, Played]) -> None:
    """It cannot be told anything after that, and is to be started again."""
    engine, played = made
    played.steps = [RuntimeError("out of memory")]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.do({"do": "generate", "asks": [["fine", {}, [0]]], "number": 1}, Line())
    assert played.aborted == []
    assert engine.is_broken()
