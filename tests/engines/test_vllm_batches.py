"""What is asked of an engine and what it says: sent together where it belongs together, nothing mixed up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.numbers_as_text import (
    floats_from_text,
    floats_to_text,
    integers_from_text,
    integers_to_text,
)
from hacrl.engines.vllm.backend import EngineLostError, IndexedSamples, Request, sampling_fields
from hacrl.engines.vllm.child import _grouped
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.seeding import derive_seed
from hacrl.types import Rollout, Sampling
from tests.support.engines import sample_rollouts, take_for_proven
from tests.support.sevens import problem
from tests.support.texts import decode_response
from tests.support.tiny import pair_agent

PROBLEMS = [problem(prompt) for prompt in ("1+1:", "22+3:", "7")]
STOP = 1


class Batches:
    """Answers in batches, out of order, with ids that tell the prompt; dies after the first batch."""

    name, can_sleep = "an engine", False

    def __init__(self) -> None:
        self.asked: list[list[Request]] = []

    def start(self) -> None:
        """Nothing is needed."""

    def generate(self, asks: Sequence[Request]) -> Iterator[IndexedSamples]:
        self.asked.append(list(asks))
        first = [at for at in (8, 5, 3, 0) if at < len(asks)]
        rest = [at for at in reversed(range(len(asks))) if at not in first]
        yield [(position, self.said(asks[position])) for position in first]
        if len(self.asked) == 1:
            raise EngineLostError("an engine died.")
        yield [(position, self.said(asks[position])) for position in rest]

    @staticmethod
    def said(ask: Request) -> Sample:
        """The prompt backwards and, if it has an even number of tokens, a stop token."""
        assert ask.seed is not None
        ids = (*reversed(ask.prompt_ids), *([STOP] if len(ask.prompt_ids) % 2 == 0 else []))
        return Sample(ids, tuple(-float(ask.seed % 1000) - place for place in range(len(ids))))


def test_stop_strings_are_searched_in_the_whole_text() -> None:
    """Requests without stop strings, such as those of the weight check, ask for no text at all."""
    plain = Request((1, 2), Sampling(8), (STOP,), None)
    stopping = Request((1, 2), Sampling(8, stop=("#", "57")), (STOP,), None)
    more = {
        key: value for key, value in sampling_fields(stopping).items() if key not in sampling_fields(plain)
    }
    assert more == {
        "stop": ["#", "57"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert len(_grouped([plain, stopping, stopping])) == 2


def test_responses_that_end_together_go_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, backend = pair_agent(), Batches()
    assert agent.stop_ids == {STOP}
    engine = VllmEngine(agent, backend, VllmSettings(seeded=True), [])
    monkeypatch.setattr(engine, "_send_weights", partial(take_for_proven, engine))
    heard: dict[int, Rollout] = {}
    rollouts = sample_rollouts(engine, PROBLEMS, 3, Sampling(8), 5, heard.__setitem__)
    assert heard == dict(enumerate(rollouts))
    # 9 are asked for; 4 have ended when it dies, and the others are asked for again, at 0 to 4
    assert list(heard) == [8, 5, 3, 0, 6, 1, 7, 4, 2]
    first, second = backend.asked
    assert second == [first[place] for place in (1, 2, 4, 6, 7)]
    assert len({ask.seed for ask in first}) == 9
    assert {len(agent.encode_prompt(one)) % 2 for one in PROBLEMS} == {0, 1}
    for place, (rollout, ask) in enumerate(zip(rollouts, first, strict=True)):
        own = PROBLEMS[place // 3]
        prompt = agent.encode_prompt(own)
        said = Batches.said(ask)
        spoken = tuple(reversed(prompt))
        assert (rollout.problem, ask.prompt_ids) == (own, prompt)
        assert (rollout.token_ids, rollout.token_logprobs) == (said.token_ids, said.logprobs)
        assert rollout.text == decode_response(agent, spoken, prompt)
        assert rollout.finish_reason == ("stop" if len(prompt) % 2 == 0 else "length")


@pytest.mark.parametrize("seeded", [True, False])
def test_seeds_of_responses_reach_vllm(monkeypatch: pytest.MonkeyPatch, seeded: bool) -> None:
    agent, backend = pair_agent(), Batches()
    engine = VllmEngine(agent, backend, VllmSettings(seeded=seeded), [])
    monkeypatch.setattr(engine, "_send_weights", partial(take_for_proven, engine))
    monkeypatch.setattr(backend, "said", lambda ask: Sample((STOP,), (0.0,)))
    request = GenerationRequest([(5, 6), (7,)], 2, Sampling(8), frozenset({STOP}), 5)
    engine.generate(replace(request, response_seeds=(11, 7, 11, 3)))
    engine.generate(request)
    keyed, _, plain = backend.asked  # the first engine dies after its first batch
    assert [ask.seed for ask in keyed] == ([11, 7, 11, 3] if seeded else [None] * 4)
    own = [derive_seed(5, index) for index in range(4)]
    assert [ask.seed for ask in plain] == (own if seeded else [None] * 4)


def test_a_prompt_is_sent_once_for_all_that_stand_side_by_side() -> None:
    short, long = Sampling(3), Sampling(4)
    asks = [
        Request((5, 6), short, (1,), 10),
        Request((5, 6), short, (1,), 11),
        Request((7,), short, (1,), None),
        Request((5, 6), short, (1,), None),
        Request((5, 6), long, (1,), 12),
        Request((5, 6), long, (1, 2), 13),
    ]
    sent = [
        (ids, fields["max_tokens"], fields["stop_token_ids"], seeds) for ids, fields, seeds in _grouped(asks)
    ]
    assert sent == [
        ((5, 6), 3, [1], [10, 11]),
        ((7,), 3, [1], [None]),
        ((5, 6), 3, [1], [None]),
        ((5, 6), 4, [1], [12]),
        ((5, 6), 4, [1, 2], [13]),
    ]


def test_numbers_are_read_as_they_were_written() -> None:
    ids = (0, 151_935, 2**31 - 1)
    assert integers_from_text(integers_to_text(list(ids))) == ids
    floats = (-0.1, -1e-300, 0.0, -math.inf, 5e-324, -math.pi)
    assert floats_from_text(floats_to_text(number for number in floats)) == floats
    assert math.isnan(*floats_from_text(floats_to_text([math.nan])))
    assert (integers_from_text(integers_to_text([])), floats_from_text(floats_to_text([]))) == ((), ())


def test_responses_with_seeds_and_limits_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two responses to each of two prompts. Without ``seeded``, vLLM gets no seeds."""
    agent = pair_agent()
    request = GenerationRequest(
        [(5, 6), (7,)],
        2,
        Sampling(8),
        frozenset((STOP,)),
        0,
        response_seeds=(9, 8, 7, 6),
        limits=(1, 2, 3, 8),
    )
    for seeded, seeds in ((True, [9, 8, 7, 6]), (False, [None] * 4)):
        engine = VllmEngine(agent, Batches(), VllmSettings(seeded=seeded), [])
        monkeypatch.setattr(engine, "_max_length", 10)
        asked = engine._requests(request)
        assert [ask.seed for ask in asked] == seeds
        assert [ask.sampling.max_new_tokens for ask in asked] == [1, 2, 3, 8]
        assert [ask.prompt_ids for ask in asked] == [(5, 6), (5, 6), (7,), (7,)]
