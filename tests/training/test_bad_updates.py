"""Updates whose loss or gradient is not finite are left out; too many in a row end the run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AnyMethodSettings, GspoSettings, HacpoSettings, LearningSettings
from hacrl.errors import TrainingError
from hacrl.models.agent import Agent
from hacrl.training.batching import minibatches
from hacrl.training.learner import Learner
from hacrl.training.metrics import learn_report
from hacrl.training.samples import LearnerSamples
from hacrl.types import LearnerSample
from tests.support.faults import nan_gradients
from tests.support.tiny import char_agent, sharpened
from tests.training.handmade import SAMPLING, largest_difference, sample, weights

GSPO = GspoSettings(clip_low=0.1, clip_high=0.2)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def fresh(dtype: torch.dtype = torch.float32) -> Agent:
    agent = sharpened(char_agent("ada"), 10.0)
    agent.model.to(dtype)
    return agent


def learner(
    agent: Agent, method: AnyMethodSettings = GSPO, exact: bool = True, max_bad_updates: int = 5, **settings
) -> Learner:
    learning = LearningSettings(**{"lr": 1e-2, "weight_decay": 0.1, **settings})
    limits = {"exact_sampler": exact, "max_bad_updates": max_bad_updates}
    return Learner(agent, make_method(method), learning, SAMPLING, **limits)


def six(agent: Agent) -> list[LearnerSample]:
    return [sample(agent, i, 0.95, a) for i, a in enumerate((1.0, -0.5, 2.0, -1.5, 0.5, 1.0))]


def everything(mine: Learner) -> dict[str, Tensor]:
    """Return weights, masters, moments and step counts."""
    tensors = {f"optimizer.{name}": value.clone() for name, value in mine.optimizer.tensors().items()}
    return weights(mine.agent) | tensors


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@DTYPES
def test_a_bad_update_changes_no_state_and_the_next_update_works(dtype: torch.dtype) -> None:
    agent, undisturbed = fresh(dtype), fresh(dtype)
    mine, theirs = learner(agent), learner(undisturbed)
    samples = six(agent)
    for one in (mine, theirs):
        one.learn(samples, updates=1, seed=0)  # so that there are moments
    before = everything(mine)
    with nan_gradients(agent.model, lambda _: True) as spoilt:
        stats = mine.learn(samples, updates=1, seed=1)
    assert spoilt == [1]
    assert_same(everything(mine), before)
    assert agent.policy_version == 1
    assert (stats.updates, stats.bad_updates, dict(stats.sources)) == (0, 1, {})
    (note,) = stats.notes
    assert note.startswith("agent 'ada': loss -")
    assert note.endswith(
        "and gradient norm nan at update 1 of the step are not finite: the update was left out, the "
        "weights were not changed. 5 such updates in a row end the run"
    )
    assert mine.learn(samples, updates=2, seed=2) == theirs.learn(samples, updates=2, seed=2)
    assert_same(everything(mine), everything(theirs))


@DTYPES
@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_bad_mini_batch_has_no_effect_on_the_other_updates_of_the_step(
    dtype: torch.dtype, bad: int
) -> None:
    agent, undisturbed = fresh(dtype), fresh(dtype)
    samples = six(agent)
    mine, theirs = learner(agent), learner(undisturbed)
    with nan_gradients(agent.model, lambda number: number == bad) as spoilt:
        stats = mine.learn(samples, updates=3, seed=4)
    assert spoilt == [bad]
    batches = minibatches(samples, 3, 1, "mixed", 4)
    expected = [theirs.learn(batches[i], updates=1, seed=0) for i in range(3) if i != bad - 1]
    assert_same(everything(mine), everything(theirs))
    assert (stats.updates, stats.bad_updates, agent.policy_version) == (2, 1, 2)
    assert stats.losses == [loss for one in expected for loss in one.losses]
    assert stats.grad_norms == [norm for one in expected for norm in one.grad_norms]
    assert stats.sources["ada"].ratios == [r for one in expected for r in one.sources["ada"].ratios]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_leaves_the_update_out(value: float) -> None:
    agent = fresh()
    samples = six(agent)
    mine = learner(agent)
    before = everything(mine)
    stats = mine.learn([*samples[:5], replace(samples[5], advantage=value)], updates=1, seed=0)
    assert (stats.updates, stats.bad_updates) == (0, 1)
    assert_same(everything(mine), before)


def test_the_report_has_only_finite_numbers() -> None:
    agent = fresh()
    mine = learner(agent, exact=False)
    with nan_gradients(agent.model, lambda number: number in (2, 3)):
        stats = mine.learn(six(agent), updates=3, seed=0)
    assert len(stats.notes) == 1  # the first time in a step
    assert "at update 2 of the step" in stats.notes[0]
    report = learn_report("ada", stats, LearnerSamples())
    assert (report.updates, report.bad_updates) == (1, 2)
    assert (report.loss, report.grad_norm) == (stats.losses[0], stats.grad_norms[0])
    assert report.loss != 0
    json.dumps(asdict(report), allow_nan=False)
    with torch.no_grad():
        agent.model.lm_head.weight[5, 0] = math.inf  # now nothing that is computed is finite
    stats = mine.learn(six(fresh()), updates=2, seed=0)
    report = learn_report("ada", stats, LearnerSamples())
    assert (report.updates, report.bad_updates, report.loss, report.grad_norm) == (0, 2, 0.0, 0.0)
    json.dumps(asdict(report), allow_nan=False)


def test_the_sampler_gap_is_reported_even_if_the_only_update_is_bad() -> None:
    agent = fresh()
    with nan_gradients(agent.model, lambda _: True):
        stats = learner(agent).learn(six(agent), updates=1, seed=0)
    # 22 tokens, each at a ratio of .95
    assert stats.sampler_gaps == pytest.approx([-math.log(0.95)] * 22, abs=1e-5)


@DTYPES
def test_too_many_bad_updates_in_a_row_end_the_run_across_steps(dtype: torch.dtype) -> None:
    agent = fresh(dtype)
    samples = six(agent)
    mine = learner(agent, max_bad_updates=3)
    with nan_gradients(agent.model, lambda number: number not in (1, 4)):
        assert mine.learn(samples, updates=3, seed=0).bad_updates == 2  # the first one is good
        assert mine.learn(samples, updates=2, seed=1).bad_updates == 1  # good again: counting starts anew
        assert mine.state_dict()["bad_updates_in_a_row"] == 1
        assert mine.learn(samples, updates=1, seed=2).bad_updates == 1
        before = everything(mine)
        message = (
            r"agent 'ada': loss .* and gradient norm nan at update 1 of the step are not finite, 3 in a row "
            r"\(3 are allowed\); the weights were not changed. Lower learning.lr"
        )
        with pytest.raises(TrainingError, match=message):
            mine.learn(samples, updates=3, seed=3)
    assert_same(everything(mine), before)
    assert agent.policy_version == 2


def test_a_resumed_run_continues_the_count_of_bad_updates() -> None:
    first, second = fresh(), fresh()
    begun = learner(first, max_bad_updates=2)
    with nan_gradients(first.model, lambda _: True):
        begun.learn(six(first), updates=1, seed=0)
    state = json.loads(json.dumps(begun.state_dict()))
    assert state == {"micro_batch_tokens": 4096, "bad_updates_in_a_row": 1, "gradient_shares": {}}
    resumed = learner(second, max_bad_updates=2)
    resumed.load_state_dict(state)
    with nan_gradients(second.model, lambda _: True), pytest.raises(TrainingError, match="2 in a row"):
        resumed.learn(six(second), updates=1, seed=0)


def test_the_clip_bound_tightens_only_with_updates_that_were_made() -> None:
    # bounds .8, .825, .85, .875: a ratio of .81 is inside before the first update that is made, not after it
    agent = fresh()
    cross = [sample(agent, 1, 0.81, advantage=1.0, own=False)] * 4
    mine = learner(agent, HacpoSettings(delta=0.2, delta_step=0.025), lr=1e-9, weight_decay=0.0)
    with nan_gradients(agent.model, lambda number: number == 1):
        stats = mine.learn(cross, updates=4, seed=0)
    assert stats.sources["other"].clipped == [0, 1, 1]


def test_an_agent_can_be_trained_by_another_learner_after_a_bad_update() -> None:
    """The first learner must no longer collect gradients of 16-bit weights."""
    agent, untouched = fresh(torch.bfloat16), fresh(torch.bfloat16)
    samples = six(agent)
    stopped = learner(agent, max_bad_updates=1)
    with nan_gradients(agent.model, lambda _: True), pytest.raises(TrainingError):
        stopped.learn(samples, updates=1, seed=0)
    again, fresh_start = learner(agent), learner(untouched)
    assert again.learn(samples, updates=2, seed=0) == fresh_start.learn(samples, updates=2, seed=0)
    assert largest_difference(weights(agent), weights(untouched)) == 0.0
