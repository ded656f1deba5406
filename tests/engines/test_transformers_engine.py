"""The contract of a rollout engine, over agents of three architectures and two tokenizers.

Log-probabilities are compared with a plain forward pass of one sequence at a time, warped by transformers.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.types import Rollout, Sampling
from tests.support.engines import sample_rollouts
from tests.support.forward import plain_logprobs, warped
from tests.support.sevens import problem
from tests.support.tiny import absolute_agent, char_agent, pair_agent, sharpened, with_logit_bias

PROBLEMS = [problem(prompt) for prompt in ("1:", "(23+14)*2:", "7-4:", "2+3+4+5+6+77:", "0:")]
AGENTS = [char_agent, pair_agent, absolute_agent]


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> Agent:
    return sharpened(request.param())


def ending(agent: Agent, bias: float) -> Agent:
    """Responses end early, at different places."""
    return with_logit_bias(agent, {"<eos>": bias})


def check_logprobs(agent: Agent, rollouts: list[Rollout], sampling: Sampling) -> None:
    for rollout in rollouts:
        prompt_ids = agent.encode_prompt(rollout.problem)
        with torch.no_grad():
            expected = plain_logprobs(agent.model, prompt_ids, rollout.token_ids, sampling)
        assert rollout.token_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(12),
        Sampling(12, temperature=0.6),
        Sampling(12, temperature=1.5),
        Sampling(12, top_k=5),
        Sampling(12, top_p=0.8),
        Sampling(12, temperature=0.8, top_k=9, top_p=0.9),
    ],
)
def test_logprobs_are_those_of_a_plain_forward_pass(agent: Agent, sampling: Sampling) -> None:
    rollouts = sample_rollouts(TransformersEngine(agent), PROBLEMS, 3, sampling, seed=1)
    assert [r.problem.id for r in rollouts] == [p.id for p in PROBLEMS for _ in range(3)]
    assert len({r.token_ids for r in rollouts}) > 5
    check_logprobs(agent, rollouts, sampling)


@pytest.mark.parametrize("max_batch", [1, 4, 7, 512])
def test_chunks_and_dropped_rows_do_not_mix_responses_up(agent: Agent, max_batch: int) -> None:
    sampling = Sampling(24)
    engine = TransformersEngine(ending(agent, 2.0), max_batch=max_batch)
    rollouts = sample_rollouts(engine, PROBLEMS, 3, sampling, seed=2)
    assert [r.problem.id for r in rollouts] == [p.id for p in PROBLEMS for _ in range(3)]
    lengths = sorted(r.num_tokens for r in rollouts)
    assert lengths[0] <= 4  # rows have left at different times
    assert lengths[-1] >= 6
    assert len(set(lengths)) >= 4
    check_logprobs(agent, rollouts, sampling)


def test_stop_token_is_last_and_only_last(agent: Agent) -> None:
    rollouts = sample_rollouts(TransformersEngine(ending(agent, 2.0)), PROBLEMS, 8, Sampling(10), seed=3)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert rollout.agent == agent.name
        assert len(rollout.token_logprobs) == rollout.num_tokens
        if rollout.finish_reason == "stop":
            assert rollout.token_ids.index(1) == rollout.num_tokens - 1
            assert rollout.text == agent.tokenizer.decode(rollout.token_ids[:-1])
        else:
            assert 1 not in rollout.token_ids
            assert rollout.num_tokens == 10
            assert rollout.text == agent.tokenizer.decode(rollout.token_ids)
        assert "<eos>" not in rollout.text


def test_every_stop_token_of_the_model_ends_a_response() -> None:
    agent = with_logit_bias(sharpened(char_agent()), {"#": 4.0, "<eos>": 3.0})
    agent.model.generation_config.eos_token_id = [1, 20]
    rollouts = sample_rollouts(TransformersEngine(agent), PROBLEMS, 8, Sampling(30), seed=3)
    last = Counter(r.token_ids[-1] for r in rollouts if r.finish_reason == "stop")
    assert set(last) == {1, 20}
    for rollout in rollouts:
        assert not {1, 20} & set(rollout.token_ids[:-1])
        assert "#" not in rollout.text


def test_same_seed_same_rollouts(agent: Agent) -> None:
    engine = TransformersEngine(agent)
    first = sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=5)
    torch.manual_seed(123)  # the global generator plays no part
    assert sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=5) == first
    other = sample_rollouts(engine, PROBLEMS, 4, Sampling(8), seed=6)
    assert sum(a.token_ids != b.token_ids for a, b in zip(first, other, strict=True)) > 15


def test_greedy_is_what_transformers_generates(agent: Agent) -> None:
    rollouts = sample_rollouts(
        TransformersEngine(ending(agent, 1.0)), PROBLEMS, 2, Sampling(12, temperature=0), seed=0
    )
    for rollout in rollouts:
        prompt = torch.tensor([agent.encode_prompt(rollout.problem)])
        generated = agent.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12
        )
        assert rollout.token_ids == tuple(generated[0, prompt.shape[1] :].tolist())
        assert rollout.token_logprobs == (0.0,) * rollout.num_tokens  # certain
    assert len({r.token_ids for r in rollouts}) > 2


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, 0.7, top_k=6), Sampling(1, top_p=0.7)])
def test_tokens_are_as_frequent_as_they_are_likely(agent: Agent, sampling: Sampling) -> None:
    draws = 6000
    rollouts = sample_rollouts(
        TransformersEngine(agent, max_batch=draws), PROBLEMS[:1], draws, sampling, seed=7
    )
    counts = Counter(r.token_ids[0] for r in rollouts)
    prompt = torch.tensor([agent.encode_prompt(PROBLEMS[0])])
    with torch.no_grad():
        likely = warped(agent.model(prompt).logits[:, -1], sampling)[0].softmax(dim=-1).tolist()
    assert all(likely[token] > 0 for token in counts)
    # Pearson's statistic over tokens expected at least 5 times has mean k - 1 and variance about 2 (k - 1)
    expected = {token: draws * p for token, p in enumerate(likely) if draws * p >= 5}
    statistic = math.fsum((counts[token] - e) ** 2 / e for token, e in expected.items())
    freedom = len(expected) - 1
    assert freedom >= 2
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_second_tokens_follow_their_own_first_token() -> None:
    """Rows are independent: the pair frequencies are the product p(a) p(b | a)."""
    agent = sharpened(char_agent())
    draws = 6000
    rollouts = sample_rollouts(
        TransformersEngine(agent, max_batch=draws), PROBLEMS[:1], draws, Sampling(2), seed=8
    )
    first = Counter(r.token_ids[0] for r in rollouts if r.num_tokens == 2)
    common, times = first.most_common(1)[0]
    prompt = agent.encode_prompt(PROBLEMS[0])
    with torch.no_grad():
        logits = agent.model(torch.tensor([[*prompt, common]])).logits[0, -1]
    counts = Counter(r.token_ids[1] for r in rollouts if r.token_ids[0] == common)
    expected = {t: times * p for t, p in enumerate(logits.softmax(dim=-1).tolist()) if times * p >= 5}
    statistic = math.fsum((counts[t] - e) ** 2 / e for t, e in expected.items())
    freedom = len(expected) - 1
    assert times > 500
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
