"""One agent's updates against updates written out in plain torch, one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AnyMethodSettings, GspoSettings, LearningSettings, NaiveSettings
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.forward import plain_logprobs
from tests.support.tiny import char_agent, pair_agent, sharpened
from tests.training.handmade import (
    SAMPLING,
    PlainAdamW,
    gradients,
    gradients_of,
    gspo_mean_loss,
    largest_difference,
    sample,
    weights,
)

GSPO = GspoSettings(clip_low=0.1, clip_high=0.2)
UNCLIPPED = 1e9  # a gradient norm that is never reached


def fresh(make=char_agent) -> Agent:
    return sharpened(make(), 10.0)


def learner(
    agent: Agent,
    method: AnyMethodSettings = GSPO,
    lr: float | None = None,
    max_bad_updates: int = 5,
    **settings,
) -> Learner:
    learning = LearningSettings(**{"lr": 1e-2, **settings})
    return Learner(agent, make_method(method), learning, SAMPLING, lr, max_bad_updates=max_bad_updates)


def four(agent: Agent) -> list[LearnerSample]:
    return [
        sample(agent, 0, ratio=1.0, advantage=1.0),
        sample(agent, 1, ratio=1.3, advantage=2.0),  # above the upper bound, advantage > 0: clipped
        sample(agent, 2, ratio=0.7, advantage=-1.0),  # below the lower bound, advantage < 0: clipped
        sample(agent, 3, ratio=1.05, advantage=-1.5),
    ]


@pytest.mark.parametrize("make", [char_agent, pair_agent])
def test_gspo_updates_equal_plain_torch(make) -> None:
    agent, plain = fresh(make), fresh(make)
    settings = {"betas": (0.8, 0.9), "weight_decay": 0.1, "max_grad_norm": 0.5}
    mine = learner(agent, **settings)
    adamw = PlainAdamW(plain.model, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1, max_norm=0.5)
    samples = four(agent)
    for step in range(3):  # the optimizer's memory lasts from step to step
        before = weights(agent)
        stats = mine.learn(samples, updates=1, seed=step)
        loss = gspo_mean_loss(plain.model, samples, 0.1, 0.2)
        norm = adamw.step(loss)
        assert stats.losses == pytest.approx([loss.item()], rel=1e-4, abs=1e-6)
        assert stats.grad_norms == pytest.approx([norm], rel=1e-4)
        assert largest_difference(weights(agent), before) > 5e-3
        # Adam makes much of rounding where a gradient is almost 0, and processors round differently
        assert largest_difference(weights(agent), weights(plain)) < 2e-5


def test_loss_and_statistics_by_hand() -> None:
    agent = fresh()
    stats = learner(agent).learn(four(agent), updates=1, seed=0)
    # - min(1, 1), - min(2.6, 1.2 * 2), - min(-.7, .9 * -1), - min(-1.575, -1.575) = -1, -2.4, .9, 1.575
    assert stats.losses == pytest.approx([(-1 - 2.4 + 0.9 + 1.575) / 4], abs=1e-5)
    seen = dict(zip(stats.sources["char"].ratios, stats.sources["char"].clipped, strict=True))
    assert sorted(seen) == pytest.approx([0.7, 1.0, 1.05, 1.3], abs=1e-5)
    assert [seen[ratio] for ratio in sorted(seen)] == [1.0, 0.0, 0.0, 1.0]
    assert (stats.updates, stats.skipped, agent.policy_version) == (1, 0, 1)


def test_micro_batches_do_not_change_the_gradient() -> None:
    whole, cut, pairs = fresh(), fresh(), fresh()
    samples = four(whole)
    for agent, budget in ((whole, 16384), (cut, 1), (pairs, 25)):
        learner(agent, micro_batch_tokens=budget, max_grad_norm=UNCLIPPED).learn(samples, updates=1, seed=0)
    for one, other, third in zip(gradients(whole), gradients(cut), gradients(pairs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(one, third, atol=1e-5, rtol=1e-4)


def test_samples_without_advantage_count_in_the_mean_but_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    skipping, running, plain = fresh(), fresh(), fresh()
    idle = [replace(one, advantage=0.0) for one in four(skipping)]
    samples = [*four(skipping)[:2], *idle, sample(skipping, 4, 1.0, -0.5)]
    settings = {"micro_batch_tokens": 1, "max_grad_norm": UNCLIPPED}
    skipped = learner(skipping, **settings).learn(samples, updates=2, seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "_carries_signal", lambda *_: True)
        ran = learner(running, **settings).learn(samples, updates=2, seed=3)
    assert (skipped.skipped, ran.skipped) == (4, 0)
    assert largest_difference(weights(skipping), weights(running)) == 0.0
    assert skipped.losses == ran.losses
    # one update of all seven, in plain torch
    one_update = fresh()
    learner(one_update, **settings).learn(samples, updates=1, seed=0)
    expected = gradients_of(plain, lambda: gspo_mean_loss(plain.model, samples, 0.1, 0.2))
    for mine, theirs in zip(gradients(one_update), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_an_update_without_signal_still_applies_the_optimizer() -> None:
    agent, plain = fresh(), fresh()
    mine = learner(agent, weight_decay=0.1)
    adamw = PlainAdamW(plain.model, 1e-2, (0.9, 0.999), 0.1, 1.0)
    samples = four(agent)
    idle = [replace(one, advantage=0.0) for one in samples]
    for batch, skipped in ((idle, 4), (samples, 0), (idle, 4)):  # at first, and with momentum
        stats = mine.learn(batch, updates=1, seed=0)
        adamw.step(gspo_mean_loss(plain.model, batch, 0.1, 0.2))
        assert (stats.skipped, stats.updates) == (skipped, 1)
        assert largest_difference(weights(agent), weights(plain)) < 2e-6
    assert (stats.losses, stats.grad_norms, dict(stats.sources)) == ([0.0], [0.0], {})
    assert agent.policy_version == 3


def test_gradient_norm_is_clipped() -> None:
    free, held = fresh(), fresh()
    loose = learner(free, max_grad_norm=UNCLIPPED).learn(four(free), updates=1, seed=0)
    tight = learner(held, max_grad_norm=0.01).learn(four(held), updates=1, seed=0)
    norm = torch.cat([g.flatten() for g in gradients(free)]).norm().item()
    assert norm > 1
    assert loose.grad_norms == tight.grad_norms == pytest.approx([norm], rel=1e-5)
    clipped = torch.cat([g.flatten() for g in gradients(held)]).norm().item()
    assert clipped == pytest.approx(0.01, rel=1e-3)


def test_own_learning_rate_overrides_the_general_one() -> None:
    # Adam's first step is lr * g / |g|: the largest change is the learning rate
    for lr, expected in ((None, 1e-2), (3e-3, 3e-3)):
        agent = fresh()
        before = weights(agent)
        learner(agent, lr=lr).learn(four(agent), updates=1, seed=0)
        assert largest_difference(weights(agent), before) == pytest.approx(expected, rel=1e-3)


def test_kl_pulls_own_samples_only_towards_the_weights_at_the_start() -> None:
    start, moved = fresh(), fresh()
    method = NaiveSettings(clip_low=0.5, clip_high=0.5, kl_coefficient=0.1)
    mine = learner(moved, method, max_grad_norm=UNCLIPPED)
    with torch.no_grad():
        for index, parameter in enumerate(moved.model.parameters()):
            parameter.mul_(1.1 if index % 2 else 0.8)
    own = sample(moved, 1, ratio=1.0, advantage=0.0)
    cross = sample(moved, 3, ratio=0.9, advantage=2.0, own=False)
    silent = sample(moved, 4, ratio=1.0, advantage=0.0, own=False)
    plain = fresh()
    plain.model.load_state_dict(moved.model.state_dict())
    stats = mine.learn([own, cross, silent], updates=1, seed=0)
    assert stats.skipped == 1  # the silent one; own ones are needed for the KL term

    def expected() -> torch.Tensor:
        now = plain_logprobs(plain.model, own.prompt_ids, own.response_ids, SAMPLING)
        then = plain_logprobs(start.model, own.prompt_ids, own.response_ids, SAMPLING).detach()
        k3 = (torch.exp(then - now) - (then - now) - 1).mean()
        logprob = plain_logprobs(plain.model, cross.prompt_ids, cross.response_ids, SAMPLING).sum()
        s = torch.exp((logprob - cross.behaviour_logprob) / cross.source_length)
        assert k3.item() > 0.01
        return (0.1 * k3 - 2.0 * s) / 3

    assert stats.losses == pytest.approx([expected().item()], rel=1e-4)
    for mine_, theirs in zip(gradients(moved), gradients_of(plain, expected), strict=True):
        torch.testing.assert_close(mine_, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("where", ["advantage", "weights"])
def test_a_non_finite_loss_does_not_change_the_weights(where: str) -> None:
    agent = fresh(lambda: char_agent("ada"))
    mine = learner(agent, weight_decay=0.1, max_bad_updates=1)
    samples = four(agent)
    if where == "advantage":
        samples[2] = replace(samples[2], advantage=math.nan)
    else:
        with torch.no_grad():
            agent.model.lm_head.weight[5, 0] = math.inf
    before = weights(agent)
    with pytest.raises(TrainingError, match=r"agent 'ada': loss .* at update 1 of the step are not finite"):
        mine.learn(samples, updates=1, seed=0)
    assert all(torch.equal(weights(agent)[name], value) for name, value in before.items())
    assert agent.policy_version == 0
