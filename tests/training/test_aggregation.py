"""Aggregation and overlong punishment in a learner: over the whole mini-batch, however it is cut."""

from __future__ import annotations

import pytest
import torch

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.methods import make_method
from hacrl.config.load import build_config
from hacrl.config.schema import GrpoSettings, GspoSettings, LearningSettings, NaiveSettings
from hacrl.errors import ConfigError
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import SampleBuilder
from tests.support.forward import plain_logprobs
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.tiny import char_agent, pair_agent, sharpened
from tests.training.handmade import RESPONSES, SAMPLING, gradients, gradients_of, sample
from tests.training.runs import Runs

ADVANTAGES = (1.0, 2.0, -1.0, 0.0, -1.5, 0.5)  # one response has none, but its tokens count


def fresh():
    return sharpened(char_agent(), 10.0)


def samples_of(agent):
    return [sample(agent, which, 1.0, advantage) for which, advantage in enumerate(ADVANTAGES)]


@pytest.mark.parametrize("budget", [1, 30, 16384])
@pytest.mark.parametrize(
    ("settings", "divisor"),
    [
        (GrpoSettings(aggregation="token"), sum(map(len, RESPONSES))),  # of all six, 2 + 6 + 1 + 8 + 2 + 3
        (GspoSettings(aggregation="token", clip_low=0.2, clip_high=0.2), 22),
        (GrpoSettings(aggregation="constant"), 6 * SAMPLING.max_new_tokens),
    ],
)
def test_tokens_of_the_whole_mini_batch_count_however_it_is_cut(settings, divisor: int, budget: int) -> None:
    agent, plain = fresh(), fresh()
    learning = LearningSettings(lr=1e-2, micro_batch_tokens=budget, max_grad_norm=1e9)
    stats = Learner(agent, make_method(settings), learning, SAMPLING).learn(samples_of(agent), 1, seed=0)
    assert divisor in (22, 96)
    assert stats.skipped == 1

    def loss():
        # every ratio is 1, so that the loss is - sum_i |y_i| A_i / divisor, and its gradient that of log pi
        parts = []
        for one in samples_of(plain):
            logprobs = plain_logprobs(plain.model, one.prompt_ids, one.response_ids, SAMPLING)
            old = torch.tensor(one.behaviour_logprobs)
            ratio = (logprobs - old).exp() if settings.name == "grpo" else (logprobs - old).mean().exp()
            parts.append((ratio * one.advantage * torch.ones(len(old))).sum())
        return -torch.stack(parts).sum() / divisor

    # - (2 * 1 + 6 * 2 - 1 * 1 + 0 - 2 * 1.5 + 3 * .5) = -11.5
    assert stats.losses == pytest.approx([-11.5 / divisor], abs=1e-5)
    for mine, theirs in zip(gradients(agent), gradients_of(plain, loss), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


def test_overlong_responses_lose_reward_in_advantages_alone() -> None:
    """Of at most 4 tokens with a buffer of 2: 3 tokens cost 1/2, 4 cost 1, in the source's own tokens."""
    ada, bob = char_agent("ada"), pair_agent("bob")
    said = {
        "ada": (judged(rollout(ada, "7"), 1.0), judged(rollout(ada, "77"), 1.0)),  # 2 and 3 tokens with stop
        "bob": (judged(rollout(bob, "77"), 1.0), judged(rollout(bob, "1717", stopped=False), 1.0)),
    }
    assert [one.rollout.num_tokens for one in (*said["ada"], *said["bob"])] == [2, 3, 2, 2]
    group = PromptGroup(problem("1:"), said)
    method = make_method(NaiveSettings(), normaliser=Normaliser(epsilon=0.0))

    def advantages(**options):
        built = SampleBuilder(ada, method, **options).build([group], lambda *_: 1.0)
        return [one.advantage for one in built.samples]

    assert advantages() == [0.0] * 4
    # rewards 1, 1/2, 1, 1: mean 7/8; squares 3/64 + 9/64 = 12/64, over 3: 1/16, deviation 1/4
    assert advantages(overlong=(4, 2)) == pytest.approx([0.5, -1.5, 0.5, 0.5])
    assert group.rewards == {"ada": (1.0, 1.0), "bob": (1.0, 1.0)}


def test_a_run_with_dapos_settings(runs: Runs) -> None:
    """The reported reward is the verdicts'; the learner's signal has the penalty in it."""
    method = GrpoSettings(aggregation="token")
    plain = runs("char", method=method, steps=1)
    shaped = runs("char", method=method, steps=1, learning={"overlong_buffer": 4})
    (before,), (after,) = plain.of("char"), shaped.of("char")
    assert after["rollout"] == before["rollout"]
    assert after["capability"] == before["capability"]
    assert after["learning"]["loss"] != before["learning"]["loss"]


def test_a_buffer_longer_than_a_response_is_refused() -> None:
    recipe = {"agents": [{"name": "a", "model": "bundled:qwen-large"}], "output": "runs/x", "method": "grpo"}
    with pytest.raises(ConfigError, match=r"overlong_buffer=65 is more than .*max_new_tokens=64.* usual, 12"):
        build_config({**recipe, "learning": {"overlong_buffer": 65}, "rollout": {"max_new_tokens": 64}})
    with pytest.raises(ConfigError, match="overlong_buffer must not be negative"):
        build_config({**recipe, "learning": {"overlong_buffer": -1}})
