"""The cosine between a learner's own and cross gradients, against gradients of one sample at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import HacpoSettings, LearningSettings
from hacrl.models.agent import Agent
from hacrl.models.rank_group import OneRank
from hacrl.training.alignment import cosine_of_ranks
from hacrl.training.batching import minibatches
from hacrl.training.gradients import evenly_spaced_numbers
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample
from tests.support.forward import plain_logprobs
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, largest_difference, sample, weights

# ratios inside all clip ranges, so that a sample's gradient is that of s A
WIDE = HacpoSettings(clip_low=0.5, clip_high=0.5, delta=0.5, cross_upper=1.5, alpha=0.0)


def fresh() -> Agent:
    return sharpened(char_agent(), 10.0)


def learner(agent: Agent, **settings: object) -> Learner:
    given = LearningSettings(**{"lr": 1e-9, "micro_batch_tokens": 40, **settings})  # type: ignore[arg-type]
    return Learner(agent, make_method(WIDE), given, SAMPLING)


def mixed(agent: Agent) -> list[LearnerSample]:
    own = [sample(agent, which, 1.0, advantage) for which, advantage in ((0, 1.0), (1, -0.5), (2, 2.0))]
    others = [
        sample(agent, which, 0.9, advantage, own=False)
        for which, advantage in ((3, 1.0), (4, -1.0), (0, 0.5))
    ]
    return [*own, *others]


def plain_gradient(agent: Agent, samples: list[LearnerSample]) -> torch.Tensor:
    """The gradient of the sum of -s A over the samples."""
    agent.model.zero_grad()
    for one in samples:
        logprob = plain_logprobs(agent.model, one.prompt_ids, one.response_ids, SAMPLING).sum()
        s = torch.exp((logprob - one.behaviour_logprob) / one.source_length)
        (-s * one.advantage).backward()
    gradient = torch.cat([weight.grad.flatten() for weight in agent.model.parameters()])
    agent.model.zero_grad()
    return gradient


def test_the_cosine_is_that_of_separate_backward_passes() -> None:
    agent = fresh()
    samples = mixed(agent)
    own = plain_gradient(agent, [one for one in samples if one.is_own])
    others = plain_gradient(agent, [one for one in samples if not one.is_own])
    expected = float(torch.nn.functional.cosine_similarity(own, others, dim=0))
    assert 0.01 < abs(expected) < 0.99
    stats = learner(agent).learn(samples, updates=1, seed=0)
    assert stats.alignment == pytest.approx(expected, abs=1e-4)


def test_the_comparison_changes_no_update() -> None:
    one, other = fresh(), fresh()
    with_it = learner(one, lr=1e-2).learn(mixed(one), updates=2, seed=0)
    without = learner(other, lr=1e-2, measure_alignment=False).learn(mixed(other), updates=2, seed=0)
    assert with_it.alignment is not None
    assert without.alignment is None
    assert with_it.grad_norms == pytest.approx(without.grad_norms, rel=1e-4)
    assert largest_difference(weights(one), weights(other)) < 1e-5


def test_equal_and_opposite_lessons() -> None:
    agent = fresh()
    own = sample(agent, 3, 1.0, 1.0)
    same = replace(own, is_own=False, source="other")
    assert learner(agent).learn([own, same], 1, seed=0).alignment == pytest.approx(1.0, abs=1e-5)
    opposite = replace(same, advantage=-1.0)
    assert learner(agent).learn([own, opposite], 1, seed=0).alignment == pytest.approx(-1.0, abs=1e-5)


def test_nothing_is_compared_with_nothing() -> None:
    agent = fresh()
    own = sample(agent, 3, 1.0, 1.0)
    assert learner(agent).learn([own], 1, seed=0).alignment is None
    silent = replace(own, is_own=False, source="other", advantage=0.0)
    assert learner(agent).learn([own, silent], 1, seed=0).alignment is None
    clipped = sample(agent, 1, 0.1, advantage=1.0, own=False)
    assert learner(agent).learn([own, clipped], 1, seed=0).alignment is None  # its gradient is zero


def test_a_step_is_compared_in_its_first_update_that_has_both() -> None:
    agent = fresh()
    samples = mixed(agent) * 2
    first, second = minibatches(samples, 2, 1, "mixed", seed=0)
    stats = learner(agent, lr=1e-2).learn(samples, updates=2, seed=0)
    alone = [learner(fresh()).learn(batch, updates=1, seed=0).alignment for batch in (first, second)]
    assert alone[0] != pytest.approx(alone[1], abs=1e-2)
    assert stats.alignment == pytest.approx(alone[0], abs=1e-4)


class TwoRanks(OneRank):
    """A second rank that has the same numbers."""

    def gather(self, data: bytes) -> list[bytes]:
        return [data, data]


def test_ranks_add_up_their_parts() -> None:
    one, other = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])
    assert cosine_of_ranks(one, other, OneRank()) == pytest.approx(0.6)  # 9 / (3 * 5)
    assert cosine_of_ranks(one, other, TwoRanks()) == pytest.approx(0.6)  # 18 / (sqrt(18) * sqrt(50))
    assert cosine_of_ranks(one, torch.zeros(2), OneRank()) is None


def test_large_gradients_are_compared_in_evenly_spaced_numbers() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), torch.arange(10.0, 14.0)]
    assert evenly_spaced_numbers(tensors, 10).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13]
    assert evenly_spaced_numbers(tensors, 9).tolist() == [0, 2, 4, 10, 12]  # every second one
