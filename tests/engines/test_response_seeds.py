"""Responses with seeds of their own do not depend on the request and the batch that they are part of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.models.agent import Agent
from hacrl.types import Sampling
from tests.support.architectures import TOKENIZER, tiny_model
from tests.support.engines import engine_agent, probe_prompts

SEEDS = tuple(range(100, 120))
SAMPLING = Sampling(12, temperature=0.9)


def request_of(agent: Agent) -> GenerationRequest:
    return GenerationRequest(
        probe_prompts(agent), 4, SAMPLING, frozenset(agent.stop_ids), 0, response_seeds=SEEDS
    )


def same(found: list[Sample], expected: list[Sample]) -> bool:
    """Equal tokens. Log-probabilities differ by rounding, which depends on the batch."""
    if [sample.token_ids for sample in found] != [sample.token_ids for sample in expected]:
        return False
    pairs = zip(found, expected, strict=True)
    gaps = [abs(a - b) for one, other in pairs for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    return max(gaps) < 1e-4


@pytest.mark.parametrize("continuous", [False, True], ids=["in step", "continuously"])
def test_every_way_to_decode_gives_the_same_responses(continuous: bool) -> None:
    agent = engine_agent(leaning={"<eos>": 1.0})
    request = request_of(agent)
    expected = TransformersEngine(agent, continuous=False).generate(request)
    assert len({sample.token_ids for sample in expected}) > 15
    for batch in (1, 3, 7, 512):
        engine = TransformersEngine(agent, batch, continuous=continuous)
        assert same(engine.generate(request), expected)
        assert same(engine.generate(replace(request, seed=5)), expected)  # the other seed has no effect
    part = replace(request, prompts=request.prompts[2:4], response_seeds=SEEDS[8:16])
    assert same(TransformersEngine(agent, continuous=continuous).generate(part), expected[8:16])
    others = replace(request, response_seeds=tuple(seed + 1000 for seed in SEEDS))
    assert not any(
        a.token_ids == b.token_ids and len(a.token_ids) > 4
        for a, b in zip(TransformersEngine(agent).generate(others), expected, strict=True)
    )


@pytest.mark.parametrize("continuous", [False, True], ids=["in step", "continuously"])
def test_limits_cut_the_same_responses(continuous: bool) -> None:
    """With a limit of its own, a response is the beginning of what it is without."""
    agent = engine_agent(leaning={"<eos>": 1.0})
    request = request_of(agent)
    whole = TransformersEngine(agent, continuous=continuous).generate(request)
    limits = tuple(1 + index % SAMPLING.max_new_tokens for index in range(len(SEEDS)))
    expected = [
        Sample(sample.token_ids[:limit], sample.logprobs[:limit])
        for sample, limit in zip(whole, limits, strict=True)
    ]
    for batch in (3, 512):
        engine = TransformersEngine(agent, batch, continuous=continuous)
        assert same(engine.generate(replace(request, limits=limits)), expected)


def test_a_limit_leaves_room_in_the_context() -> None:
    agent = engine_agent()
    longest = max(map(len, probe_prompts(agent)))
    agent.context_length = longest + 3
    request = replace(request_of(agent), limits=(3,) * len(SEEDS))
    assert max(len(sample.token_ids) for sample in TransformersEngine(agent).generate(request)) == 3
    with pytest.raises(ModelError, match="max_new_tokens=4 it needs"):
        TransformersEngine(agent).generate(replace(request, limits=(4,) * len(SEEDS)))


def test_a_model_with_a_state() -> None:
    agent = Agent("lfm2", tiny_model("lfm2"), TOKENIZER)
    prompts = [(4, 5, 6, 7, 8), (9, 3), (9, 3, 5, 6, 7)]
    request = GenerationRequest(prompts, 3, SAMPLING, frozenset(), 0, response_seeds=tuple(range(9)))
    expected = TransformersEngine(agent).generate(request)
    assert same(TransformersEngine(agent, max_batch=2).generate(request), expected)
    part = replace(request, prompts=prompts[1:], response_seeds=tuple(range(3, 9)))
    assert same(TransformersEngine(agent).generate(part), expected[3:])
    limits = (12, 1, 5, 2, 12, 7, 3, 4, 1)
    limited = TransformersEngine(agent).generate(replace(request, limits=limits))
    cut = [Sample(s.token_ids[:n], s.logprobs[:n]) for s, n in zip(expected, limits, strict=True)]
    assert same(limited, cut)
