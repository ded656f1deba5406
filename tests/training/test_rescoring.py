"""Methods that compare other agents' responses with the learner's own policy before the step (SAPO)."""

from __future__ import annotations

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import LearningSettings, NaiveSettings, SapoSettings
from hacrl.models.agent import Agent
from hacrl.training.batching import minibatches
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.forward import plain_logprobs
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, PlainAdamW, largest_difference, sample, weights

SAPO = SapoSettings(clip_low=0.02, clip_high=0.02)


def fresh() -> Agent:
    return sharpened(char_agent(), 10.0)


def six(agent: Agent) -> list[LearnerSample]:
    """Own and others' responses; the sources' log-probabilities say ratios far from 1."""
    return [
        sample(agent, 0, 1.0, 1.0),
        sample(agent, 1, 0.3, -1.0, own=False),
        sample(agent, 2, 1.0, -2.0),
        sample(agent, 3, 2.5, 1.5, own=False, retokenised=True),
        sample(agent, 4, 0.1, 1.0, own=False),
        sample(agent, 5, 4.0, -0.5, own=False),
    ]


def own_logprob(agent: Agent, one: LearnerSample) -> torch.Tensor:
    return plain_logprobs(agent.model, one.prompt_ids, one.response_ids, SAMPLING).sum()


@pytest.mark.parametrize("exact", [True, False], ids=["exact-sampler", "recomputed"])
def test_updates_equal_plain_torch_with_ratios_to_the_policy_before_the_step(exact: bool) -> None:
    agent, plain = fresh(), fresh()
    learning = LearningSettings(lr=1e-2, micro_batch_tokens=30, max_grad_norm=0.5, mismatch_cap=1e9)
    mine = Learner(agent, make_method(SAPO), learning, SAMPLING, exact_sampler=exact)
    adamw = PlainAdamW(plain.model, 1e-2, learning.betas, 0.0, max_norm=0.5)
    samples = six(agent)
    stats = mine.learn(samples, updates=3, seed=0)
    with torch.no_grad():
        old = {one.rollout_key + one.response_ids: own_logprob(plain, one) for one in samples}
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for minibatch in minibatches(samples, 3, 1, "mixed", seed=0):
        losses = []
        for one in minibatch:
            logprob = own_logprob(plain, one)
            s = torch.exp((logprob - old[one.rollout_key + one.response_ids]) / len(one.response_ids))
            losses.append(-torch.min(s * one.advantage, s.clamp(0.98, 1.02) * one.advantage))
            ratios[one.is_own].append(s.item())
        adamw.step(torch.stack(losses).mean())
    assert largest_difference(weights(agent), weights(plain)) < 2e-5
    assert sorted(stats.sources["other"].ratios) == pytest.approx(sorted(ratios[False]), rel=1e-4)
    assert max(abs(s - 1.0) for s in ratios[False]) > 0.01  # the policy has moved by the later updates


def test_a_method_without_rescoring_keeps_the_sources_numbers() -> None:
    agent = fresh()
    other = sample(agent, 1, 0.3, -1.0, own=False)
    learner = Learner(agent, make_method(SAPO), LearningSettings(), SAMPLING)
    batch = learner.loss_batch([other], updates_done=0)
    assert batch.behaviour_logprob_B.item() == pytest.approx(own_logprob(agent, other).item(), rel=1e-5)
    assert batch.sampler_logprobs_BT is None  # nothing is corrected for the sampler's numerics
    naive = Learner(fresh(), make_method(NaiveSettings()), LearningSettings(), SAMPLING)
    assert naive.loss_batch([other], 0).behaviour_logprob_B.item() == pytest.approx(other.behaviour_logprob)
