"""Responses that never end, end at once, or do not fit; and what a rollout says of its policy."""

from __future__ import annotations

import pytest

from hacrl.engines.answering import verify_rollouts
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import ModelError
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.rollouts import rollout
from tests.support.sevens import SevensTask, problem
from tests.support.texts import decode_response
from tests.support.tiny import char_agent, pair_agent, sharpened, with_logit_bias

PROBLEMS = [problem("1:"), problem("(23+14)*2:")]


@pytest.mark.parametrize("make", [char_agent, pair_agent])
def test_a_response_that_never_ends_has_all_its_tokens(make) -> None:
    agent = with_logit_bias(sharpened(make()), {"<eos>": -100.0})
    for said in sample_rollouts(TransformersEngine(agent), PROBLEMS, 3, Sampling(17), seed=0):
        assert (said.finish_reason, said.num_tokens) == ("length", 17)
        assert said.text == decode_response(agent, said.token_ids, ())


@pytest.mark.parametrize("make", [char_agent, pair_agent])
def test_an_empty_response_is_one_stop_token(make) -> None:
    agent = with_logit_bias(sharpened(make()), {"<eos>": 100.0})
    for said in sample_rollouts(TransformersEngine(agent), PROBLEMS, 3, Sampling(17), seed=0):
        assert (said.finish_reason, said.text, said.token_ids) == ("stop", "", (1,))
        assert said.token_logprobs == pytest.approx((0.0,), abs=1e-6)


def test_one_new_token_may_be_the_stop_token() -> None:
    agent = with_logit_bias(sharpened(char_agent()), {"<eos>": 4.0})
    rollouts = sample_rollouts(TransformersEngine(agent), PROBLEMS, 20, Sampling(1), seed=0)
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}
    for said in rollouts:
        assert said.num_tokens == 1
        assert (said.text == "") == (said.finish_reason == "stop")


def test_the_context_is_used_to_its_last_position_and_not_beyond() -> None:
    # "(23+14)*2:" is 10 characters: 54 more fill the context of 64
    agent = with_logit_bias(sharpened(char_agent("ada")), {"<eos>": -100.0})
    engine = TransformersEngine(agent)
    assert [r.num_tokens for r in sample_rollouts(engine, PROBLEMS, 1, Sampling(54), seed=0)] == [54, 54]
    message = (
        "agent 'ada': prompt 2 of 2 has 10 tokens; with max_new_tokens=55 it needs 65, the context has 64"
    )
    with pytest.raises(ModelError, match=message):
        sample_rollouts(engine, PROBLEMS, 1, Sampling(55), seed=0)


def test_a_rollout_has_the_version_of_its_policy() -> None:
    agent = char_agent()
    engine = TransformersEngine(agent)
    assert sample_rollouts(engine, PROBLEMS[:1], 1, Sampling(2), seed=0)[0].policy_version == 0
    agent.policy_version = 6
    assert sample_rollouts(engine, PROBLEMS[:1], 1, Sampling(2), seed=0)[0].policy_version == 6


def test_sampling_leaves_gradients_and_weights_alone() -> None:
    agent = char_agent()
    before = {name: weights.clone() for name, weights in agent.model.state_dict().items()}
    sample_rollouts(TransformersEngine(agent), PROBLEMS, 2, Sampling(5), seed=0)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in agent.model.parameters())
    assert all(weights.equal(before[name]) for name, weights in agent.model.state_dict().items())


def test_every_rollout_gets_the_verdict_of_its_own_text() -> None:
    agent = char_agent()
    said = [rollout(agent, text) for text in ("71", "1", "")]
    verified = verify_rollouts(SevensTask(), said)
    assert [v.rollout for v in verified] == said
    assert [(v.reward, v.verdict.label) for v in verified] == [
        (1, "correct"),
        (0, "wrong"),
        (0, "unparsable"),
    ]
