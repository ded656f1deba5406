"""Inputs of the loss: number of the update, sampling distribution, lengths, per-token log-probabilities."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AnyMethodSettings, GrpoSettings, GspoSettings, HacpoSettings, LearningSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.rollouts import judged
from tests.support.sevens import problem
from tests.support.tiny import absolute_agent, char_agent, pair_agent, sharpened, with_logit_bias
from tests.training.handmade import SAMPLING, largest_difference, sample, weights


def fresh() -> Agent:
    return sharpened(char_agent(), 10.0)


def learner(agent: Agent, method: AnyMethodSettings, sampling: Sampling = SAMPLING, **settings) -> Learner:
    """The learning rate is so small that ratios stay what they are."""
    return Learner(agent, make_method(method), LearningSettings(**{"lr": 1e-9, **settings}), sampling)


def test_the_lower_bound_tightens_with_every_update_of_a_step() -> None:
    agent = fresh()
    mine = learner(agent, HacpoSettings(delta=0.2, delta_step=0.025))
    # bounds .8, .825, .85, .875: a ratio of .86 is inside for three updates, one of .81 for one
    for ratio, clipped in ((0.86, [0, 0, 0, 1]), (0.81, [0, 1, 1, 1])):
        cross = [sample(agent, 1, ratio, advantage=1.0, own=False)] * 4
        for _ in range(2):  # a new step starts again
            stats = mine.learn(cross, updates=4, seed=0)
            assert stats.sources["other"].ratios == pytest.approx([ratio] * 4, abs=1e-5)
            assert stats.sources["other"].clipped == clipped


def test_a_clipped_cross_sample_has_no_gradient() -> None:
    agent = fresh()
    before = weights(agent)
    far = [sample(agent, 1, ratio, advantage=1.0, own=False) for ratio in (0.7, 1.1)]
    stats = learner(agent, HacpoSettings(), lr=1e-2).learn(far, updates=1, seed=0)
    assert stats.grad_norms == [0.0]
    assert largest_difference(weights(agent), before) == 0.0
    near = [sample(agent, 1, 0.9, advantage=1.0, own=False)]
    learner(agent, HacpoSettings(), lr=1e-2).learn(near, updates=1, seed=0)
    assert largest_difference(weights(agent), before) == pytest.approx(1e-2, rel=1e-3)


def test_statistics_are_per_source() -> None:
    agent = fresh()
    samples = [
        sample(agent, 0, 1.0, advantage=1.0),
        sample(agent, 1, 0.9, advantage=1.0, own=False),
        sample(agent, 2, 0.5, advantage=1.0, own=False),
        replace(sample(agent, 3, 0.95, advantage=1.0, own=False), source="third"),
        sample(agent, 4, 1.0, advantage=0.0, own=False),
    ]
    stats = learner(agent, HacpoSettings()).learn(samples, updates=1, seed=0)
    assert {source: len(seen.ratios) for source, seen in stats.sources.items()} == {
        "char": 1,
        "other": 2,
        "third": 1,
    }
    assert sorted(stats.sources["other"].clipped) == [0.0, 1.0]
    assert stats.skipped == 1


@pytest.mark.parametrize("sampling", [Sampling(16, temperature=0.6), Sampling(16, 1.4)])
def test_ratios_are_under_the_sampling_distribution(sampling: Sampling) -> None:
    agent = fresh()
    own = [sample(agent, which, 1.1, advantage=1.0, sampling=sampling) for which in range(5)]
    stats = learner(agent, GspoSettings(), sampling).learn(own, updates=1, seed=0)
    assert stats.sources["char"].ratios == pytest.approx([1.1] * 5, abs=1e-4)


def test_ratio_of_a_retokenised_response_is_over_the_source_s_length() -> None:
    # six tokens at a ratio of .9 each, three tokens at the source: .9^6 to the power of 1/3 is .81
    agent = fresh()
    cross = replace(sample(agent, 1, 0.9, advantage=1.0, own=False, retokenised=True), source_length=3)
    stats = learner(agent, HacpoSettings()).learn([cross], updates=1, seed=0)
    assert stats.sources["other"].ratios == pytest.approx([0.81], abs=1e-5)


def test_every_token_is_compared_with_its_own_behaviour_logprob() -> None:
    # GRPO clips token by token to [.8, 1.28]. Advantage 1: two of six tokens at 1.5, so 2 / 6 are clipped;
    # advantage -1: three of eight at .5. One row is shorter than the other, so padding must not count.
    agent = fresh()
    up, down = sample(agent, 1, 1.0, advantage=1.0), sample(agent, 3, 1.0, advantage=-1.0)
    up = replace(up, behaviour_logprobs=shifted(up.behaviour_logprobs, {0: 1.5, 4: 1.5}))
    down = replace(down, behaviour_logprobs=shifted(down.behaviour_logprobs, {1: 0.5, 2: 0.5, 7: 0.5}))
    stats = learner(agent, GrpoSettings()).learn([up, down], updates=1, seed=0)
    assert sorted(stats.sources["char"].clipped) == pytest.approx([2 / 6, 3 / 8])
    # - (4 * 1 + 2 * 1.28) / 6 and (5 * 1 + 3 * .8) / 8
    assert stats.losses == pytest.approx([(-(4 + 2.56) / 6 + (5 + 2.4) / 8) / 2], abs=1e-5)


def shifted(logprobs: tuple[float, ...] | None, ratios: dict[int, float]) -> tuple[float, ...]:
    assert logprobs is not None
    return tuple(value - math.log(ratios.get(t, 1.0)) for t, value in enumerate(logprobs))


def test_sampler_gap_is_taken_from_own_tokens_before_the_first_update() -> None:
    agent = fresh()
    own = sample(agent, 1, 1.3, advantage=1.0)  # six tokens, each log 1.3 from the learner's
    cross = sample(agent, 3, 0.9, advantage=1.0, own=False)
    stats = learner(agent, HacpoSettings()).learn([own, cross], updates=1, seed=0)
    assert stats.sampler_gaps == pytest.approx([math.log(1.3)] * 6, abs=1e-5)
    twice = learner(agent, HacpoSettings()).learn([own, own], updates=2, seed=0)
    assert len(twice.sampler_gaps) == 6
    assert twice.updates == 2


@pytest.mark.parametrize("make", [char_agent, pair_agent, absolute_agent])
@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, 0.7, top_k=10, top_p=0.9)])
def test_fresh_rollouts_have_ratio_one_and_no_gap(make, sampling: Sampling) -> None:
    """Sampler and learner agree on a rollout of the present policy, however it was sampled."""
    agent = with_logit_bias(sharpened(make()), {"<eos>": 1.0})
    one = problem("12+3:")
    rollouts = sample_rollouts(TransformersEngine(agent), [one], 8, sampling, seed=0)
    group = PromptGroup(one, {agent.name: tuple(judged(r, i % 2) for i, r in enumerate(rollouts))})
    method = make_method(GspoSettings())
    builder = SampleBuilder(agent, method)
    samples = builder.build([group], lambda *_: 1.0).samples
    stats = Learner(agent, method, LearningSettings(lr=1e-3), sampling).learn(samples, updates=1, seed=0)
    assert stats.sources[agent.name].ratios == pytest.approx([1.0] * 8, abs=1e-5)
    assert len(stats.sampler_gaps) == sum(r.num_tokens for r in rollouts)
    assert max(stats.sampler_gaps) < 1e-4
    assert stats.grad_norms[0] > 0.01
