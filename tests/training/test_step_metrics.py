"""Numbers of a step against plain forward passes and the paper's formulas, from the rollouts of real runs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, HacpoSettings, LearningSettings, NaiveSettings
from hacrl.models.agent import Agent
from hacrl.training.learner import Learner
from hacrl.types import Sampling
from tests.support.forward import plain_logprobs, warped
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, sample, weights
from tests.training.runs import HACPO, Run, Runs

ROLLOUT = {"prompts_per_step": 8, "rollouts_per_prompt": 8, "max_new_tokens": 6, "temperature": 0.7}


def test_the_entropy_is_that_of_the_sampled_distributions(runs: Runs) -> None:
    """Within four standard errors of the exact entropy, the sum over the whole vocabulary."""
    run = runs("char", "pair", steps=1, rollout=ROLLOUT)
    for name in ("char", "pair"):
        agent, sampling = Agent.load(runs.agent(name), "cpu"), Sampling(6, 0.7)
        exact, surprises = [], []
        for one in (verified.rollout for verified in run.watcher.rollouts[1, name]):
            ids = [*one.prompt_ids, *one.token_ids]
            with torch.no_grad():
                logits = agent.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            rows = warped(logits[len(one.prompt_ids) - 1 : -1], sampling)
            exact += torch.distributions.Categorical(logits=rows).entropy().tolist()
            surprises += [-logprob for logprob in one.token_logprobs]
        spread = math.sqrt(fmean((value - fmean(surprises)) ** 2 for value in surprises))
        found = run.of(name)[0]["rollout"]["entropy"]
        assert abs(found - fmean(exact)) < 4 * spread / math.sqrt(len(exact))
        assert found > 2  # random weights: nearly log(22) = 3.1 for characters


def rewards_of(run: Run, step: int, agent: str) -> dict[str, list[float]]:
    rewards = defaultdict(list)
    for verified in run.watcher.rollouts[step, agent]:
        rewards[verified.rollout.problem.id].append(verified.reward)
    return rewards


@pytest.mark.parametrize("method", [HACPO, GspoSettings(), NaiveSettings()], ids=lambda one: one.name)
def test_baselines_ratios_and_prompts_without_variance(runs: Runs, method) -> None:
    agents = ("char", "pair")
    few = {**ROLLOUT, "rollouts_per_prompt": 3}
    run = runs(*agents, method=replace(method, capability_window=2), steps=3, rollout=few)
    history: dict[str, list[float]] = {name: [] for name in agents}
    seen = set()
    for step in (1, 2, 3):
        rewards = {name: rewards_of(run, step, name) for name in agents}
        for name in agents:
            history[name].append(fmean(reward for group in rewards[name].values() for reward in group))
        power = {name: fmean(values[-2:]) for name, values in history.items()}
        for name, other in (agents, agents[::-1]):
            found = run.of(name)[step - 1]
            omega = min(max(power[name] / power[other], 0.1), 10.0)
            assert found["capability_ratios"] == {other: pytest.approx(omega)}
            own, both, silent = [], [], 0
            for prompt, group in rewards[name].items():
                theirs = rewards[other][prompt]
                own.append(fmean(group))
                both.append((fmean(group) + omega * fmean(theirs)) / 2)
                joint = group + theirs if method.shares_rollouts else group
                silent += min(joint) == max(joint)
            expected = {
                "gspo": fmean(own),
                "naive": fmean(r for one in rewards.values() for group in one.values() for r in group),
                # a baseline above the highest reward is replaced by the own mean
                "hacpo": fmean(m if mu > 1 else mu for mu, m in zip(both, own, strict=True)),
            }[method.name]
            assert found["learning"]["baseline"] == pytest.approx(expected)
            assert found["learning"]["without_signal"] == silent / 8
            wrong = sum(max(group) == 0 for group in rewards[name].values()) / 8
            right = sum(min(group) == 1 for group in rewards[name].values()) / 8
            assert (found["rollout"]["all_wrong"], found["rollout"]["all_right"]) == (wrong, right)
            seen |= {silent / 8, wrong}
    assert len(seen) > 2  # prompts of both kinds


def test_tokens_generated_and_trained_on(runs: Runs) -> None:
    """One pass over all samples: what is trained on is what was generated for prompts with a signal."""
    learning = {"updates_per_step": 2}
    run = runs("char", "twin", method=NaiveSettings(), steps=1, rollout=ROLLOUT, learning=learning)
    said = {name: run.watcher.rollouts[1, name] for name in ("char", "twin")}
    rewards = defaultdict(set)
    for verified in (*said["char"], *said["twin"]):
        rewards[verified.rollout.problem.id].add(verified.reward)
    learnt = {
        name: sum(v.rollout.num_tokens for v in rollouts if len(rewards[v.rollout.problem.id]) > 1)
        for name, rollouts in said.items()
    }
    for name in said:
        (report,) = run.of(name)
        assert report["rollout"]["tokens"] == sum(v.rollout.num_tokens for v in said[name])
        sources = report["learning"]["sources"]
        assert {source: values["tokens"] for source, values in sources.items()} == learnt
        assert report["learning"]["tokens"] == sum(learnt.values())


def test_the_kl_between_old_and_new_policy_by_hand() -> None:
    # every token at a ratio of 1.25 (advantage 1), then .5 (advantage -1): r - 1 - log r is
    # .25 - log 1.25 = .02686 and -.5 - log .5 = .19315
    agent = sharpened(char_agent(), 10.0)
    mine = Learner(agent, make_method(GspoSettings()), LearningSettings(lr=1e-9), SAMPLING)
    samples = [sample(agent, 1, 1.25, advantage=1.0), sample(agent, 3, 0.5, advantage=-1.0)]
    cross = [sample(agent, 5, 0.9, advantage=1.0, own=False)]  # does not count
    stats = mine.learn([*samples, *cross], updates=1, seed=0)
    assert sorted(stats.own.policy_kls) == pytest.approx([0.02686, 0.19315], abs=1e-4)
    assert stats.own.reference_kls == []
    # both are clipped from the first update on, on different sides; in the only update, nothing is "later"
    assert sorted(stats.sources["char"].clipped_above) == [0.0, 1.0]
    assert sorted(stats.sources["char"].clipped_below) == [0.0, 1.0]
    assert stats.own.later_clipped == []
    again = mine.learn([samples[0]] * 2, updates=2, seed=0)
    assert again.own.later_clipped == [1.0]


def test_the_kl_to_the_reference_against_plain_forward_passes() -> None:
    agent = sharpened(char_agent(), 10.0)
    before = weights(agent)
    method = make_method(HacpoSettings(kl_coefficient=0.5, clip_low=0.9, clip_high=9.0))
    mine = Learner(agent, method, LearningSettings(lr=1e-2), SAMPLING)
    samples = [sample(agent, which, 1.0, advantage=1.0) for which in (1, 3)]
    first = mine.learn(samples, updates=1, seed=0)
    assert first.own.reference_kls == pytest.approx([0.0, 0.0], abs=1e-6)
    second = mine.learn(samples, updates=1, seed=1)  # at the weights after one update
    start = char_agent()
    start.model.load_state_dict(before)
    moved = char_agent()
    moved.model.load_state_dict(before)
    Learner(moved, method, LearningSettings(lr=1e-2), SAMPLING).learn(samples, updates=1, seed=0)
    expected = []
    for one in samples:
        with torch.no_grad():
            new, old = (
                plain_logprobs(which.model, one.prompt_ids, one.response_ids, SAMPLING)
                for which in (moved, start)
            )
        log_r = (old - new).double()  # k3: r - 1 - log r with r = pi_reference / pi
        expected.append(float((log_r.exp() - 1 - log_r).mean()))
    assert sorted(second.own.reference_kls) == pytest.approx(sorted(expected), rel=1e-3)
    assert min(expected) > 1e-3
    # the samples' old policy is the reference's, too: KL(old || new) is the other direction
    assert sorted(second.own.policy_kls) != pytest.approx(sorted(expected), rel=1e-3)
