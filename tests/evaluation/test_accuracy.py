"""Accuracy and its error, by hand, and of a real agent."""

from __future__ import annotations

import math

import pytest

from hacrl.config.schema import EvaluationSettings
from hacrl.engines.answering import Answerer
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.training.metrics import Accuracy, accuracy_by_problem, accuracy_of
from hacrl.types import Sampling
from tests.support.engines import sample_rollouts
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent, with_logit_bias


def test_error_is_over_problems_not_over_samples() -> None:
    # problem means 1, 0, .5: mean .5, variance (.25 + .25 + 0) / 2 = .25, error sqrt(.25 / 3)
    accuracy = accuracy_of([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    assert accuracy == Accuracy(0.5, pytest.approx(math.sqrt(0.25 / 3)), 3, 4)


def test_more_samples_of_the_same_problems_do_not_shrink_it() -> None:
    # problem means 1 and 0: variance .5 over 1 degree, error sqrt(.5 / 2) = .5, whatever the samples
    for samples in (1, 4, 100):
        assert accuracy_of([[1.0] * samples, [0.0] * samples]) == Accuracy(0.5, 0.5, 2, samples)


def test_one_problem_has_no_spread() -> None:
    assert accuracy_of([[1.0, 0.0, 0.0, 0.0]]) == Accuracy(0.25, 0.0, 1, 4)


def test_samples_are_grouped_by_problem() -> None:
    """The verdicts of the rollouts, recomputed problem by problem."""
    task = SevensTask()
    engine = TransformersEngine(with_logit_bias(char_agent(), {"7": 1.5}))
    sampling = Sampling(3)
    accuracy = accuracy_by_problem(
        Answerer(engine.policy, engine, task).answer(task.test, 6, sampling, seed=4), 6
    )
    means = {}
    for one in task.test:
        rewards = [
            float("7" in said.text)
            for said in sample_rollouts(engine, task.test, 6, sampling, seed=4)
            if said.problem.id == one.id
        ]
        assert len(rewards) == 6
        means[one.id] = sum(rewards) / 6
    mean = sum(means.values()) / 5
    spread = sum((value - mean) ** 2 for value in means.values()) / 4
    assert 0 < mean < 1
    assert spread > 0
    assert accuracy == Accuracy(pytest.approx(mean), pytest.approx(math.sqrt(spread / 5)), 5, 6)


def test_evaluation_samples_without_top_k_or_top_p() -> None:
    assert EvaluationSettings(temperature=0.7).sampling(Sampling(9, top_p=0.5, stop=("#",))) == Sampling(
        9, 0.7, top_k=0, top_p=1.0, stop=("#",)
    )


@pytest.mark.parametrize(
    ("key", "value"), [("problems", -1), ("every", -1), ("samples_per_problem", 0), ("temperature", -0.1)]
)
def test_impossible_settings_name_the_key(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{key} must .* not {value}"):
        EvaluationSettings(**{key: value})
