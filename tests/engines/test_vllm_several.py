"""Several vLLM engines of one agent: who samples what, and what happens when one of them dies."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm.backend import EngineLostError, IndexedSamples, Request
from hacrl.engines.vllm.engine import MAX_RESTARTS, VllmEngine
from hacrl.engines.vllm.several import VllmEngines
from hacrl.models.agent import Agent
from hacrl.types import Sampling
from tests.support.engines import take_for_proven
from tests.support.tiny import char_agent

STOP = 1
PROMPTS = [(5,), (6, 5), (7,), (8, 9), (9,)]


@dataclass
class Fake:
    """Says what prompt and seed decide. ``dies_after``: responses until it is gone, once."""

    name: str
    dies_after: int | None = None
    starts_left: int = 100
    can_sleep: bool = False
    updates_while_generating: bool = True
    asked: list[list[Request]] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        if self.starts_left == self.starts:
            raise EngineError(f"{self.name} does not start")
        self.starts += 1

    def generate(self, requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        self.asked.append(list(requests))
        for place, request in enumerate(requests):
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.dies_after = None
                    raise EngineLostError(f"{self.name} died.")
            yield [(place, said(request.prompt_ids, request.seed))]

    def generate_live(self, requests: Sequence[Request], most: int) -> Iterator[IndexedSamples]:
        return self.generate(requests)

    def close(self) -> None:
        """Nothing is left of it."""


def said(prompt: tuple[int, ...], seed: int | None) -> Sample:
    assert seed is not None
    return Sample((*prompt, seed % 7, STOP), (-float(seed % 5), -1.0, -2.0)[: len(prompt) + 2])


@pytest.fixture
def agent() -> Agent:
    return char_agent()


def engines_of(agent: Agent, monkeypatch: pytest.MonkeyPatch, *fakes: Fake) -> VllmEngines:
    made = [VllmEngine(agent, fake, VllmSettings(seeded=True), [], starts_alone=False) for fake in fakes]
    for engine in made:
        monkeypatch.setattr(engine, "_send_weights", partial(take_for_proven, engine))
    return VllmEngines(agent, made)


def request_of(samples: int = 3, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> GenerationRequest:
    return GenerationRequest(prompts, samples, Sampling(8), frozenset({STOP}), 4)


def expected(request: GenerationRequest) -> list[Sample]:
    """The responses, each by its own prompt and seed."""
    seeds = request.seeds_of_responses()
    size = request.samples_per_prompt
    return [said(request.prompts[index // size], seed) for index, seed in enumerate(seeds)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prompts_are_dealt_out_and_seeds_decide_what_is_said(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    fakes = [Fake(f"engine {number}") for number in range(count)]
    engines = engines_of(agent, monkeypatch, *fakes)
    heard: dict[int, Sample] = {}
    threads: set[int] = set()

    def on_finished(finished: Sequence[tuple[int, Sample]]) -> None:
        heard.update(finished)
        threads.add(threading.get_ident())

    request = request_of()
    assert engines.generate(request, on_finished) == expected(request)
    assert [heard[index] for index in range(15)] == expected(request)
    assert threads == {threading.get_ident()}  # callers need no locks
    # 5 prompts for 2 engines: the first has prompts 0, 2 and 4, the second 1 and 3
    prompts = [[ask.prompt_ids for (asked,) in [fake.asked] for ask in asked] for fake in fakes]
    assert prompts == [[prompt for prompt in PROMPTS[k::count] for _ in range(3)] for k in range(count)]


def test_fewer_prompts_than_engines_are_divided(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [Fake("a"), Fake("b")]
    request = request_of(5, PROMPTS[:1])
    assert engines_of(agent, monkeypatch, *fakes).generate(request) == expected(request)
    assert [len(fake.asked[0]) for fake in fakes] == [3, 2]  # responses 0, 2, 4 and 1, 3


def test_others_sample_what_a_dead_engine_leaves(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [Fake("a"), Fake("b", dies_after=2), Fake("c")]
    engines = engines_of(agent, monkeypatch, *fakes)
    request = request_of()
    heard: list[int] = []
    assert engines.generate(request, lambda ended: heard.extend(index for index, _ in ended)) == expected(
        request
    )
    assert sorted(heard) == list(range(15))  # none twice
    # b has prompts 1 and 4, 6 responses, and dies after 2 of them; the others sample 4 more
    assert sum(len(asked) for fake in (fakes[0], fakes[2]) for asked in fake.asked) == 9 + 4
    (note,) = engines.take_notes()
    assert note == (
        "b died. The agent's other engines sample what is left; the next weight sync starts it again"
    )
    assert [fake.starts for fake in fakes] == [1, 1, 1]
    engines.generate(request)  # the same weights: two engines go on
    assert len(fakes[1].asked) == 1
    agent.policy_version += 1
    report = engines.sync()
    assert [fake.starts for fake in fakes] == [1, 2, 1]
    assert report is not None
    assert report.restarts == 1
    assert engines.generate(request) == expected(request)
    assert len(fakes[1].asked) == 2


def test_all_die_and_are_started_again(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [Fake("a", dies_after=2), Fake("b", dies_after=1)]
    engines = engines_of(agent, monkeypatch, *fakes)
    request = request_of()
    assert engines.generate(request) == expected(request)
    assert [fake.starts for fake in fakes] == [2, 2]
    assert len(engines.take_notes()) == 2


def test_an_engine_that_does_not_come_back_is_given_up(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = [Fake("a"), Fake("b", dies_after=2, starts_left=1)]
    engines = engines_of(agent, monkeypatch, *fakes)
    engines.generate(request_of())
    engines.take_notes()
    agent.policy_version += 1
    request = request_of()
    assert engines.generate(request) == expected(request)
    assert engines.take_notes() == ["b does not start. The run goes on without it: 1 engines are left"]
    assert len(engines.engines) == 1
    fakes[0].dies_after, fakes[0].starts_left = 2, 1
    with pytest.raises(EngineError, match=r"all of its vLLM engines are lost; a does not start"):
        engines.generate(request)


def test_an_engine_that_never_started_ends_the_run(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engines_of(agent, monkeypatch, Fake("a"), Fake("b", starts_left=0))
    with pytest.raises(EngineError, match="b does not start"):
        engines.sync()


def test_engines_that_die_again_and_again_are_given_up(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = Fake("b")
    engines = engines_of(agent, monkeypatch, Fake("a"), dying)
    engines.generate(request_of())

    def lose() -> None:
        raise EngineLostError("b died.")

    monkeypatch.setattr(engines.engines[1], "_send_weights", lose)
    agent.policy_version += 1
    engines.sync()
    assert len(engines.engines) == 1
    assert dying.starts == 1 + MAX_RESTARTS  # the first try finds it started
    assert "The run goes on without it" in engines.take_notes()[-1]


def test_a_death_while_the_agent_learns(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's weights must not be read then: the engine comes back with the next weights."""
    fakes = [Fake("a"), Fake("b", dies_after=3)]
    engines = engines_of(agent, monkeypatch, *fakes)
    engines.sync()
    engines.follows_policy = False
    request = request_of()
    assert engines.generate(request) == expected(request)
    assert [fake.starts for fake in fakes] == [1, 1]
    agent.policy_version += 1
    engines.sync()
    assert [fake.starts for fake in fakes] == [1, 2]
    fakes[0].dies_after = fakes[1].dies_after = 1
    with pytest.raises(EngineError, match=r"all of its vLLM engines were lost while it was being trained"):
        engines.generate(request)


def test_an_error_ends_all(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engines_of(agent, monkeypatch, Fake("a"), Fake("b"))

    def fail(requests: Sequence[Request]) -> Iterator[IndexedSamples]:
        raise EngineError("b refuses a token")
        yield []

    monkeypatch.setattr(engines.engines[1].backend, "generate", fail)
    with pytest.raises(EngineError, match="b refuses a token"):
        engines.generate(request_of())


def test_settings_of_each_engine() -> None:
    settings = VllmSettings(engines=2, devices=(1, 2, 3, 4))
    assert [one.devices for one in settings.each()] == [(1, 2), (3, 4)]
    assert [one.engines for one in settings.each()] == [1, 1]
    assert [one.devices for one in VllmSettings(engines=3).each()] == [None] * 3
    servers = VllmSettings(url=("http://a:8000", "http://b:8000"))
    assert [one.urls for one in servers.each()] == [("http://a:8000",), ("http://b:8000",)]
