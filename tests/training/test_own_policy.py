"""Own responses that cannot come from the agent's policy end the run before they move a weight."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AnyMethodSettings, GspoSettings, LearningSettings, NaiveSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.models.own_policy import check_own_policy, rollout_limit, sync_check_limit
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.batching import minibatches
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from hacrl.types import LearnerSample, Sampling
from tests.support.engines import sample_rollouts
from tests.support.faults import nan_gradients
from tests.support.rollouts import judged
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened, with_logit_bias
from tests.training.handmade import RESPONSES, SAMPLING, sample, weights
from tests.training.test_bad_updates import assert_same, everything

GSPO = GspoSettings(clip_low=0.5, clip_high=1.0)
NAIVE = NaiveSettings(clip_low=0.5, clip_high=1.0)
ALL = range(len(RESPONSES))  # 2 + 6 + 1 + 8 + 2 + 3 = 22 tokens
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EXACT = pytest.mark.parametrize("exact", [True, False], ids=["sampler", "learner"])  # whose pi_old


def fresh(dtype: torch.dtype = torch.float32) -> Agent:
    agent = sharpened(char_agent("ada"), 10.0)
    agent.model.to(dtype)
    return agent


def learner(
    agent: Agent,
    method: AnyMethodSettings = GSPO,
    sampling: Sampling = SAMPLING,
    told: float | None = None,
    exact: bool = True,
    **settings,
) -> Learner:
    learning = LearningSettings(**{"lr": 1e-2, **settings})
    return Learner(
        agent,
        make_method(method),
        learning,
        sampling,
        exact_sampler=exact,
        max_policy_gap=rollout_limit(told),
    )


def said(agent: Agent, shifts: Sequence[float], own: bool = True, **options) -> list[LearnerSample]:
    """Return 22 tokens per shift; the sampler's log-probabilities exceed the learner's by the shift."""
    return [
        sample(agent, which, math.exp(-shift), 1.0 - 2 * (which % 2), own=own, **options)
        for shift in shifts
        for which in ALL
    ]


def honest(agent: Agent, sampling: Sampling, responses: int = 16) -> list[LearnerSample]:
    """Return samples of the agent's responses to one prompt."""
    one = problem("12+3:")
    rollouts = sample_rollouts(TransformersEngine(agent), [one], responses, sampling, seed=0)
    group = PromptGroup(one, {agent.name: tuple(judged(r, i % 2) for i, r in enumerate(rollouts))})
    builder = SampleBuilder(agent, make_method(GSPO))
    return builder.build([group], lambda *_: 1.0).samples


def refused(mine: Learner, samples: Sequence[LearnerSample], updates: int = 1, seed: int = 0) -> str:
    """Return the error's message after checking that no weight has changed."""
    before = everything(mine)
    with pytest.raises(TrainingError) as caught:
        mine.learn(samples, updates, seed)
    assert_same(everything(mine), before)
    assert mine.agent.policy_version == 0
    return str(caught.value)


@DTYPES
@EXACT
@pytest.mark.parametrize("shifts", [(0.2, 0.2, 0.2), (0.3, -0.3, 0.0)], ids=str)
def test_a_mean_above_the_limit_is_refused_before_weights_change(dtype, exact, shifts) -> None:
    """66 tokens. In the second case sizes are .2 on average, while the differences are 0."""
    agent = fresh(dtype)
    message = refused(learner(agent, exact=exact), said(agent, shifts), updates=1)
    if dtype == torch.float32:
        assert message == (
            "agent 'ada': its own responses of this step do not come from its policy: the log-probabilities "
            f"they were sampled with differ from the learner's by 0.2 nats per token on average (at most "
            f"{max(shifts)}, over 66 tokens), allowed are 0.15. It learnt nothing from them, and nothing of "
            "this step was saved: hacrl resume goes on from the last checkpoint. The engine does not compute "
            "the same as the learner, as happens with a wrong kernel or with processors limited by "
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE. If the engine is vLLM, try agents.ada.engine=transformers; "
            "if the difference is only one of precision, raise "
            "agents.ada.vllm.max_logprob_gap"
        )


@DTYPES
@EXACT
@pytest.mark.parametrize(("shift", "told"), [(0.1, None), (0.1, 0.001), (0.2, 0.25)])
def test_a_mean_below_the_limit_is_accepted(dtype, exact, shift, told) -> None:
    agent = fresh(dtype)
    before = weights(agent)
    stats = learner(agent, told=told, exact=exact).learn(said(agent, [shift] * 3), updates=2, seed=0)
    assert stats.updates == 2
    assert any(not torch.equal(value, before[name]) for name, value in weights(agent).items())


def test_limits_are_those_of_the_proof_but_never_the_narrow_one_of_float32() -> None:
    proof = [sync_check_limit(dtype, None) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert proof == [0.001, 0.15, 0.15]
    assert sync_check_limit(torch.bfloat16, 0.01) == 0.01
    assert [rollout_limit(told) for told in (None, 0.01, 0.4)] == [0.15, 0.15, 0.4]


def test_a_few_tokens_may_differ_by_as_much_as_64_in_all() -> None:
    # .15 * 64 = 9.6 nats in all: .436 for each of 22 tokens
    agent = fresh()
    assert learner(agent, lr=1e-9).learn(said(agent, [0.42]), updates=1, seed=0).updates == 1
    assert "0.45 nats per token on average (at most 0.45, over 22 tokens), allowed are 0.436" in refused(
        learner(fresh()), said(agent, [0.45])
    )
    check_own_policy("ada", [9.5], SAMPLING, 0.15)
    check_own_policy("ada", [9.5, *[0.0] * 62], SAMPLING, 0.15)
    with pytest.raises(TrainingError, match=r"by 9\.7 nats"):
        check_own_policy("ada", [9.7], SAMPLING, 0.15)


def test_a_low_temperature_widens_the_limit_as_it_does_rounding() -> None:
    cool, hot = Sampling(16, temperature=0.5), Sampling(16, temperature=2.0)
    for sampling, passes, fails in ((cool, 0.28, 0.32), (hot, 0.13, 0.17)):
        agent = fresh()
        mine = learner(agent, sampling=sampling, lr=1e-9)
        assert "nats per token" in refused(mine, said(agent, [fails] * 3, sampling=sampling))
        assert mine.learn(said(agent, [passes] * 3, sampling=sampling), updates=1, seed=0).updates == 1


def test_greedy_responses_are_not_compared() -> None:
    """They are drawn with probability 1, which is far from what the learner gives them."""
    agent, sampling = fresh(), Sampling(8, temperature=0.0)
    stats = learner(agent, sampling=sampling).learn(honest(agent, sampling), updates=1, seed=0)
    assert len(stats.sampler_gaps) > 64
    assert sum(stats.sampler_gaps) / len(stats.sampler_gaps) > 0.5


@DTYPES
@pytest.mark.parametrize("sampling", [Sampling(8), Sampling(8, 0.3, top_k=5, top_p=0.8), Sampling(8, 0.02)])
def test_the_agents_own_responses_are_accepted(dtype: torch.dtype, sampling: Sampling) -> None:
    agent = with_logit_bias(sharpened(char_agent()), {"<eos>": 1.0})
    agent.model.to(dtype)
    stats = learner(agent, sampling=sampling).learn(honest(agent, sampling, 64), updates=2, seed=0)
    assert len(stats.sampler_gaps) > 64


@EXACT
def test_responses_are_compared_only_before_the_first_update(exact: bool) -> None:
    """The first update changes the policy so much that later responses differ from it."""
    agent = fresh()
    stats = learner(agent, exact=exact, lr=0.5).learn(said(agent, [0.0] * 8), updates=2, seed=0)
    later = stats.sources["ada"].ratios[24:]
    assert sum(abs(math.log(ratio)) for ratio in later) / len(later) > 1.0
    assert max(stats.sampler_gaps) < 1e-4


@EXACT
def test_own_responses_of_later_updates_are_compared_before_the_first(exact: bool) -> None:
    agent = fresh()
    cross, own = sample(agent, 3, 1.0, 1.0, own=False), sample(agent, 3, math.exp(-2.0), 1.0)
    seed = next(s for s in range(9) if minibatches([own, cross], 2, 1, "mixed", s)[0] == [cross])
    message = refused(learner(agent, NAIVE, exact=exact), [own, cross], updates=2, seed=seed)
    assert "by 2 nats per token on average (at most 2, over 8 tokens), allowed are 1.2" in message


def test_cross_responses_are_not_compared() -> None:
    agent = fresh()
    samples = [*said(agent, [3.0] * 4, own=False), *said(agent, [0.0])]
    assert learner(agent, NAIVE).learn(samples, updates=1, seed=0).updates == 1
    alone = learner(fresh(), NAIVE).learn(said(agent, [3.0] * 4, own=False), updates=1, seed=0)
    assert (alone.updates, alone.sampler_gaps) == (1, [])


def test_non_finite_numbers_are_left_to_bad_updates() -> None:
    check_own_policy("ada", [math.nan, math.inf, -math.inf, *[0.1] * 64], SAMPLING, 0.15)
    check_own_policy("ada", [math.nan], SAMPLING, 0.15)
    agent = fresh()
    with nan_gradients(agent.model, lambda _: True):
        assert learner(agent).learn(said(agent, [0.0] * 3), updates=1, seed=0).bad_updates == 1
        # the update would be left out, but what is wrong is known
        assert "by 0.2 nats per token" in refused(learner(agent), said(agent, [0.2] * 3))
