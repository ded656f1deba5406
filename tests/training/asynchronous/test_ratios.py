"""Importance ratios of responses that older policies sampled, or several policies one after the other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AnyMethodSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
)
from hacrl.errors import EngineMismatchError
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import LearnerSample, VersionSpans
from tests.support.forward import plain_logprobs
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import PROMPTS, RESPONSES, SAMPLING

LOW, HIGH = 0.1, 0.2
GSPO = GspoSettings(clip_low=LOW, clip_high=HIGH)
GRPO = GrpoSettings(clip_low=LOW, clip_high=HIGH)
HACPO = HacpoSettings(clip_low=LOW, clip_high=HIGH, delta=0.2, delta_step=0.01, cross_upper=1.0)
NOISE = 0.3  # of a sampler whose numerics are not the learner's, in nats per token


def agent_at(version: int) -> Agent:
    agent = sharpened(char_agent(), 10.0)
    agent.policy_version = version
    return agent


@torch.no_grad()
def logprobs(agent: Agent, which: int) -> list[float]:
    found = plain_logprobs(agent.model, PROMPTS[which % 3], RESPONSES[which], SAMPLING)
    return [float(value) for value in found]


def moved(agent: Agent) -> Agent:
    """Return the agent with other weights: an older policy of it."""
    older = agent_at(0)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in older.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return older


def sample(which: int, behaviour: list[float], advantage: float, own: bool, current: bool) -> LearnerSample:
    return LearnerSample(
        prompt_ids=PROMPTS[which % 3],
        response_ids=RESPONSES[which],
        behaviour_logprobs=tuple(behaviour),
        behaviour_logprob=math.fsum(behaviour),
        source_length=len(behaviour),
        source="char" if own else "other",
        is_own=own,
        advantage=advantage,
        is_current=current,
    )


def learner(agent: Agent, method: AnyMethodSettings, **settings) -> Learner:
    learning = LearningSettings(**{"lr": 1e-9, "max_grad_norm": 1e9, **settings})
    return Learner(agent, make_method(method), learning, SAMPLING, exact_sampler=False)


def mixed(agent: Agent, which: int, old_tokens: int) -> list[float]:
    """Return a sampler's log-probabilities: the first tokens by an older policy, the rest by the present."""
    older, now = logprobs(moved(agent), which), logprobs(agent, which)
    return older[:old_tokens] + [value + NOISE for value in now[old_tokens:]]


@pytest.mark.parametrize("method", [GSPO, GRPO, HACPO], ids=["gspo", "grpo", "hacpo"])
def test_each_token_is_compared_with_the_policy_that_sampled_it(method: AnyMethodSettings) -> None:
    """Response 1 has 6 tokens: 2 by an older policy, 4 by the present one, after an update in between."""
    agent = agent_at(8)
    now, mu = logprobs(agent, 1), mixed(agent, 1, 2)
    advantage = 0.5
    stats = learner(agent, method).learn([sample(1, mu, advantage, own=True, current=False)], 1, seed=0)
    if method is GRPO:
        r = [math.exp(p - m) for p, m in zip(now, mu, strict=True)]
        terms = [min(x * advantage, min(max(x, 1 - LOW), 1 + HIGH) * advantage) for x in r]
        # each of the last four tokens has the ratio exp(-NOISE) = 0.741, and no weight makes up for it
        assert r[2:] == pytest.approx([math.exp(-NOISE)] * 4, rel=1e-3)
        expected = -math.fsum(terms) / 6
    else:
        s = math.exp((math.fsum(now) - math.fsum(mu)) / 6)  # (pi_k(y) / mu(y))^(1/6)
        assert abs(s - 1) > 0.05
        expected = -min(s * advantage, min(max(s, 1 - LOW), 1 + HIGH) * advantage)
        assert stats.sources["char"].ratios == pytest.approx([s], rel=1e-4)
    assert stats.losses == pytest.approx([expected], rel=1e-3)
    assert stats.sampler_differences == []  # nothing to compare: these are not the learner's numbers
    assert stats.own.sampler_weights == [1.0]


def test_only_responses_of_the_present_policy_get_the_learners_old_policy() -> None:
    """Two own responses with the same noise in all tokens: one is taken to mu, the other to pi_old."""
    agent = agent_at(8)
    stale = sample(1, mixed(agent, 1, 2), 0.5, own=True, current=False)
    noisy = [value + NOISE for value in logprobs(agent, 3)]
    fresh = replace(sample(3, noisy, 0.5, own=True, current=True), index=1)
    stats = learner(agent, GSPO).learn([stale, fresh], 1, seed=0)
    s = math.exp((math.fsum(logprobs(agent, 1)) - stale.behaviour_logprob) / 6)
    numbers = {key[2]: use.numbers for key, use in stats.first_uses.items()}
    assert [numbers[index].ratio for index in (0, 1)] == pytest.approx([s, 1.0], rel=1e-4)
    # the fresh response of 8 tokens: w = exp(8 * -0.3) = 0.0907; the stale one has weight 1
    weights = [numbers[index].weight for index in (0, 1)]
    assert weights == pytest.approx([1.0, math.exp(-8 * NOISE)], rel=1e-3)
    assert stats.sampler_differences == pytest.approx([NOISE] * 8, abs=1e-4)


def test_other_agents_responses_are_taken_to_what_they_were_sampled_with() -> None:
    agent = agent_at(8)
    mu = [value + 0.05 for value in logprobs(agent, 1)]
    stats = learner(agent, HACPO).learn([sample(1, mu, 1.0, own=False, current=False)], 1, seed=0)
    s = math.exp(-0.05)  # within [1 - delta, 1]
    assert stats.sources["other"].ratios == pytest.approx([s], rel=1e-4)
    assert stats.losses == pytest.approx([-s * s**HACPO.alpha], rel=1e-3)


def test_stale_responses_are_not_checked_and_fresh_ones_are() -> None:
    agent = agent_at(8)
    far = [value - 3.0 for value in logprobs(agent, 3)]  # 3 nats per token: another policy
    limited = Learner(
        agent,
        make_method(GSPO),
        LearningSettings(lr=1e-9),
        SAMPLING,
        exact_sampler=False,
        max_policy_gap=0.01,
    )
    stale = [replace(sample(3, far, 0.5, own=True, current=False), index=index) for index in range(9)]
    stats = limited.learn(stale, 3, seed=0)
    assert (stats.updates, stats.sampler_gaps) == (3, [])
    with pytest.raises(EngineMismatchError, match="do not come from its policy"):
        limited.learn([replace(one, is_current=True) for one in stale], 3, seed=0)


@pytest.mark.parametrize(
    ("version", "versions", "is_current"),
    [
        (8, (), True),
        (7, (), False),
        (-1, (), False),
        (8, ((8, 1), (9, 1)), False),
        (7, ((7, 1), (8, 1)), False),  # the last token attends to keys and values of version 7
    ],
)
def test_a_response_is_current_if_the_present_policy_sampled_all_of_it(
    version: int, versions: VersionSpans, is_current: bool
) -> None:
    ada = char_agent("ada")
    ada.policy_version = 8
    answers = []
    for text, reward in (("7", 1.0), ("1", 0.0)):
        one = rollout(ada, text)
        (segment,) = one.segments
        one = replace(one, policy_version=version, segments=(replace(segment, versions=versions),))
        answers.append(judged(one, reward))
    group = PromptGroup(problem("1:"), {"ada": tuple(answers)})
    built = SampleBuilder(ada, make_method(GSPO)).build([group], lambda k, j: 1.0)
    assert [one.is_current for one in built.samples] == [is_current] * 2


def test_of_a_late_group_only_the_late_rollouts_teach_with_the_advantages_of_all() -> None:
    """Rewards: ada 1, 0; bob 1, 1. All against the mean .75, in units of the deviation of all four, .5."""
    ada, bob = char_agent("ada"), char_agent("bob", seed=1)
    answers = {
        "ada": tuple(judged(rollout(ada, text), reward) for text, reward in (("7", 1.0), ("1", 0.0))),
        "bob": tuple(judged(rollout(bob, text), reward) for text, reward in (("77", 1.0), ("17", 1.0))),
    }
    whole = PromptGroup(problem("1:"), answers)
    builder = SampleBuilder(ada, make_method(HACPO))
    everything = builder.build([whole], lambda k, j: 1.0)
    late = builder.build([replace(whole, teachers=("bob",), step=2)], lambda k, j: 1.0)
    assert [(one.source, one.index, one.step) for one in late.samples] == [("bob", 0, 2), ("bob", 1, 2)]
    assert [one.advantage for one in late.samples] == [
        one.advantage for one in everything.samples if one.source == "bob"
    ]
    assert late.samples[0].advantage == pytest.approx(0.25 / 0.5, rel=1e-4)
    assert late.baselines == []
    assert len(everything.baselines) == 1
