"""Episodes with a stop token after every action, in the learner: masks, ratios, gradients, statistics.

The environment answers "11" with "=2", and the agent ends with "9". With the stop token <eos>, 1::

    characters   4 4 1 | 18 5 | 12 1      pairs of digits   33 1 | 18 5 | 12 1

A learner whose output layer is zero gives every one of its 22 tokens the probability 1/22.
"""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AnyMethodSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    NaiveSettings,
)
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.batching import batch_tokens, micro_batches
from hacrl.training.learner import Learner
from hacrl.training.learnt import learnt_rollouts
from hacrl.training.samples import LearnerSamples, SampleBuilder
from hacrl.types import LearnerSample, LossBatch, Problem, Sampling
from tests.support.episodes import play, said
from tests.support.forward import plain_logprobs
from tests.support.rollouts import judged, rollout
from tests.support.tiny import char_agent, pair_agent

PROBLEM = Problem("1:", "1:", "7")
ACTIONS = (said("11", "=2"), said("9"))
SAMPLING = Sampling(16)
T, F = True, False
LN_22 = math.log(22)


def uniform(agent: Agent) -> Agent:
    """The agent with equal probabilities for all tokens."""
    torch.nn.init.zeros_(agent.model.lm_head.weight)
    return agent


def build(learner: Agent, source: Agent, method: AnyMethodSettings, stop: bool = True) -> LearnerSamples:
    """The learner's samples: the source's episode with reward 1, and an own wrong answer without episode."""
    right, wrong = judged(play(source, PROBLEM, ACTIONS), 1.0), judged(rollout(learner, "3"), 0.0)
    responses = {source.name: (right,), learner.name: (wrong,)}
    if source.name == learner.name:
        responses = {source.name: (right, wrong)}
    return SampleBuilder(learner, make_method(method), stop).build(
        [PromptGroup(PROBLEM, responses)], lambda *_: 1.0
    )


def episode(built: LearnerSamples) -> LearnerSample:
    (found,) = [sample for sample in built.samples if not all(sample.loss_mask)]
    return found


def learn(agent: Agent, sample: LearnerSample, method: AnyMethodSettings, **options):
    """Make one update of the sample alone at a learning rate of nearly 0."""
    settings = LearningSettings(lr=1e-12)
    return Learner(agent, make_method(method), settings, SAMPLING, **options).learn(
        [sample], updates=1, seed=0
    )


def test_samples_by_hand() -> None:
    own = episode(build(char_agent("ada"), char_agent("ada"), HacpoSettings()))
    assert own.response_ids == (4, 4, 1, 18, 5, 12, 1)
    assert own.loss_mask == (T, T, T, F, F, T, T)
    assert own.behaviour_logprobs == (-0.25, -0.5, -0.75, -1.0, -1.25)
    assert (own.behaviour_logprob, own.source_length, own.loss_tokens) == (-3.75, 5, 5)
    cross = episode(build(char_agent("ada"), pair_agent("bob"), HacpoSettings()))
    assert (cross.response_ids, cross.loss_mask) == (own.response_ids, own.loss_mask)
    # 33 1 12 1 are four tokens of the source: -0.25 - 0.5 - 0.75 - 1
    assert (cross.behaviour_logprobs, cross.behaviour_logprob, cross.source_length) == (None, -2.5, 4)
    assert build(char_agent("ada"), pair_agent("bob"), HacpoSettings()).length_ratios == {"bob": [5 / 4]}


def test_without_learning_stop_tokens_none_is_learnt() -> None:
    """The last one is removed; the one in the middle stays in the context, as what was sampled there."""
    own = episode(build(char_agent("ada"), char_agent("ada"), HacpoSettings(), stop=False))
    assert own.response_ids == (4, 4, 1, 18, 5, 12)
    assert own.loss_mask == (T, T, F, F, F, T)
    assert own.behaviour_logprobs == (-0.25, -0.5, -1.0)
    assert (own.behaviour_logprob, own.source_length) == (-1.75, 3)
    cross = episode(build(char_agent("ada"), pair_agent("bob"), HacpoSettings(), stop=False))
    assert (cross.response_ids, cross.loss_mask) == (own.response_ids, own.loss_mask)
    # of -0.25 (33), -0.5 (stop), -0.75 (12), -1 (stop)
    assert (cross.behaviour_logprob, cross.source_length) == (-1.0, 2)


def test_ratio_and_weight_of_an_own_episode_by_hand() -> None:
    """s = (22^-5 / e^-3.75)^(1/5) = e^0.75 / 22; each of five action tokens has the gradient s A / 5."""
    agent = uniform(char_agent("ada"))
    settings = HacpoSettings(clip_low=0.999)
    built = build(agent, agent, settings)
    stats = learn(agent, episode(built), settings)
    ratio = math.exp(0.75) / 22
    found = stats.sources["ada"]
    assert found.ratios == pytest.approx([ratio], rel=1e-5)
    assert found.source_length_ratios == found.own_length_ratios == pytest.approx([ratio], rel=1e-5)
    advantage = episode(built).advantage
    assert found.gradients == pytest.approx([ratio * advantage], rel=1e-5)
    assert stats.losses == pytest.approx([-ratio * advantage], rel=1e-5)
    assert found.tokens == 5


def test_ratio_and_weight_of_another_agent_s_episode_by_hand() -> None:
    """s = (22^-5 / e^-2.5)^(1/4), by own length e^(2.5 / 4) / 22; each of five tokens has s A / 4."""
    agent = uniform(char_agent("ada"))
    settings = NaiveSettings(clip_low=0.999)
    sample = episode(build(agent, pair_agent("bob"), settings))
    stats = learn(agent, sample, settings)
    ratio = math.exp((2.5 - 5 * LN_22) / 4)
    found = stats.sources["bob"]
    assert found.source_length_ratios == pytest.approx([ratio], rel=1e-5)
    assert found.own_length_ratios == pytest.approx([math.exp(0.625) / 22], rel=1e-5)
    assert found.gradients == pytest.approx([ratio * sample.advantage * 5 / 4], rel=1e-5)


def test_divergences_and_gaps_are_of_action_tokens() -> None:
    """k3 = r - ln r - 1 with r = pi_k / pi_old = e^0.25 / 22, e^0.5 / 22, ..., e^1.25 / 22; the mean."""
    agent = uniform(char_agent("ada"))
    logs = [quarter / 4 - LN_22 for quarter in (1, 2, 3, 4, 5)]
    stats = learn(agent, episode(build(agent, agent, GspoSettings())), GspoSettings(kl_coefficient=0.1))
    expected = sum(math.exp(log) - log - 1 for log in logs) / 5
    assert stats.own.policy_kls == pytest.approx([expected], rel=1e-5)
    assert stats.own.reference_kls == pytest.approx([0.0], abs=1e-6)
    assert stats.sampler_differences == pytest.approx([-log for log in logs], rel=1e-5)


def test_the_audit_has_one_number_per_token_of_the_episode() -> None:
    agent = uniform(char_agent("ada"))
    built = build(agent, pair_agent("bob"), HacpoSettings())
    stats = learn(agent, episode(built), HacpoSettings())
    (line,) = [one for one in learnt_rollouts("ada", stats, built) if one.agent == "bob"]
    assert line.token_ids == (4, 4, 1, 18, 5, 12, 1)
    logprob = round(-LN_22, 4)  # observations have no log-probability
    assert line.token_logprobs == (logprob, logprob, logprob, 0.0, 0.0, logprob, logprob)
    assert line.loss_mask == (T, T, T, F, F, T, T)
    (single,) = [one for one in learnt_rollouts("ada", stats, built) if one.agent == "ada"]
    assert single.loss_mask is None


def loss_batch(agent: Agent, method: AnyMethodSettings, sample: LearnerSample) -> tuple[LossBatch, Learner]:
    learner = Learner(agent, make_method(method), LearningSettings(), SAMPLING)
    other = LearnerSample((4, 21), (6, 1), (-1.0, -1.0), -2.0, 2, agent.name, True, -0.5)
    return learner.loss_batch([sample, other], updates_done=0), learner


@pytest.mark.parametrize("source", ["ada", "bob"])
def test_gradients_are_those_of_a_plain_implementation(source: str) -> None:
    """exp(sum over actions of log pi / |y|), written down with one forward pass over the whole sequence."""
    agent = char_agent("ada")
    settings = NaiveSettings(clip_low=0.999, clip_high=10.0)  # nothing is clipped: the loss is -s A
    sample = episode(build(agent, agent if source == "ada" else pair_agent("bob"), settings))
    batch, mine = loss_batch(agent, settings, sample)
    logprobs_T = plain_logprobs(agent.model, sample.prompt_ids, sample.response_ids, SAMPLING)
    stop_and_actions = logprobs_T[[0, 1, 2, 5, 6]].sum()
    ratio = torch.exp((stop_and_actions - sample.behaviour_logprob) / sample.source_length)
    terms = mine.method.loss(batch)
    torch.testing.assert_close(terms.ratio_B[0], ratio.detach(), atol=1e-6, rtol=1e-5)
    parameters = list(agent.model.parameters())
    found = torch.autograd.grad(terms.loss_B[0], parameters)
    expected = torch.autograd.grad(-ratio * sample.advantage, parameters)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_token_level_losses_align_log_probabilities_around_observations() -> None:
    """GRPO: the mean over five action tokens of pi_k(token) / pi_old(token) A."""
    agent = uniform(char_agent("ada"))
    settings = GrpoSettings(clip_low=0.999, clip_high=10.0)
    sample = episode(build(agent, agent, settings))
    batch, mine = loss_batch(agent, settings, sample)
    assert batch.mask_BT[0].tolist() == [T, T, T, F, F, T, T]
    assert batch.behaviour_logprobs_BT[0].tolist() == [-0.25, -0.5, -0.75, 0.0, 0.0, -1.0, -1.25]
    ratios = [math.exp(quarter / 4) / 22 for quarter in (1, 2, 3, 4, 5)]
    expected = -sample.advantage * sum(ratios) / 5
    assert float(mine.method.loss(batch).loss_B[0].detach()) == pytest.approx(expected, rel=1e-5)


def test_observations_count_in_micro_batches_and_not_in_lengths() -> None:
    """Prompt 2, response 7: nine tokens are computed, five are learnt."""
    sample = episode(build(char_agent("ada"), char_agent("ada"), GspoSettings()))
    assert batch_tokens([sample], packed=False) == batch_tokens([sample], packed=True) == 9
    assert sample.loss_tokens == 5
    assert [len(group) for group in micro_batches([sample] * 4, 18)] == [2, 2]
