"""Own rollouts of a sampler with other numerics: the measured gap, and training with the learner's pi_old."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AnyMethodSettings,
    GrpoSettings,
    GspoSettings,
    HacpoSettings,
    LearningSettings,
    NaiveSettings,
)
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.models.packing_support import supports_packing
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.batching import minibatches
from hacrl.training.learn_stats import LearnStats
from hacrl.training.learner import Learner
from hacrl.training.metrics import LearnReport, learn_report
from hacrl.training.old_policy import OldPolicyLogprobs, evenly_spaced
from hacrl.training.samples import LearnerSamples, SampleBuilder
from hacrl.types import LearnerSample, Sampling
from tests.support.engines import sample_rollouts
from tests.support.forward import plain_logprobs
from tests.support.rollouts import judged, with_logprobs
from tests.support.sevens import problem
from tests.support.tiny import char_agent, sharpened, with_logit_bias
from tests.training.handmade import RESPONSES, SAMPLING, PlainAdamW, largest_difference, sample, weights
from tests.training.runs import Runs

LOW, HIGH = 0.1, 0.2
GSPO = GspoSettings(clip_low=LOW, clip_high=HIGH)
NAIVE = NaiveSettings(clip_low=LOW, clip_high=HIGH)
ADVANTAGES = (1.0, -0.5, 2.0, -1.5, 0.5, 1.0)


def fresh() -> Agent:
    agent = sharpened(char_agent(), 10.0)
    supports_packing(agent.model)  # tried now, so that its passes are not counted below
    return agent


def learner(agent: Agent, method: AnyMethodSettings = GSPO, exact: bool = False, **settings) -> Learner:
    """Return a learner; by default its sampler is not exact."""
    learning = LearningSettings(**{"lr": 1e-2, "max_grad_norm": 1e9, **settings})
    return Learner(agent, make_method(method), learning, SAMPLING, exact_sampler=exact)


def noisy(one: LearnerSample, noise: Sequence[float]) -> LearnerSample:
    """Return the sample with noise added to the sampler's log-probabilities."""
    assert one.behaviour_logprobs is not None
    logprobs = tuple(value + n for value, n in zip(one.behaviour_logprobs, noise, strict=True))
    return replace(one, behaviour_logprobs=logprobs, behaviour_logprob=math.fsum(logprobs))


def noise(which: int) -> list[float]:
    """Return known noise, of either sign, different for every token."""
    return [0.04 * (which + 1) - 0.05 * t for t in range(len(RESPONSES[which]))]


def six_own(agent: Agent) -> list[LearnerSample]:
    return [
        noisy(sample(agent, which, 1.0, advantage), noise(which))
        for which, advantage in enumerate(ADVANTAGES)
    ]


@contextmanager
def counted(agent: Agent) -> Iterator[list[int]]:
    """Record the number of sequences in every forward pass."""
    sizes: list[int] = []
    hook = agent.model.register_forward_hook(
        lambda _, __, kwargs, ___: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    yield sizes
    hook.remove()


def report(stats: LearnStats) -> LearnReport:
    return learn_report("ada", stats, LearnerSamples())


def test_the_ratio_starts_at_exactly_one_for_any_sampler_logprobs() -> None:
    agent = fresh()
    samples = six_own(agent)
    corrected = learner(agent, lr=1e-9).learn(samples, updates=1, seed=0)
    assert corrected.sources["char"].ratios == [1.0] * 6
    assert corrected.sources["char"].clipped == [0.0] * 6
    plain = learner(agent, lr=1e-9, old_policy="sampler").learn(samples, updates=1, seed=0)
    ratios = [math.exp(-math.fsum(noise(which)) / len(noise(which))) for which in range(6)]
    assert sorted(plain.sources["char"].ratios) == pytest.approx(sorted(ratios), abs=1e-5)
    assert min(abs(ratio - 1) for ratio in ratios) > 0.01
    assert (plain.own.sampler_weights, plain.own.sampler_capped) == ([], [])
    # the losses: - mean(w A) with w the inverse of what the noise did to the whole response, at most 2
    w = [min(2.0, math.exp(-math.fsum(noise(which)))) for which in range(6)]
    expected = -math.fsum(x * a for x, a in zip(w, ADVANTAGES, strict=True)) / 6
    assert corrected.losses == pytest.approx([expected], abs=1e-5)
    assert sorted(corrected.own.sampler_weights) == pytest.approx(sorted(w), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ratio_is_exactly_one_until_the_weights_move(dtype: torch.dtype) -> None:
    """For any other samples in a mini-batch: in bfloat16, rounding depends on the batch."""
    agent = fresh()
    agent.model.to(dtype)
    samples = [
        *(noisy(sample(agent, which % 6, 1.0, 1.0), noise(which % 6)) for which in range(12)),
        *(sample(agent, which, 0.95, 1.0, own=False) for which in range(6)),
    ]
    before = weights(agent)
    stats = learner(agent, NAIVE, lr=1e-30, micro_batch_tokens=60).learn(samples, updates=4, seed=0)
    assert largest_difference(weights(agent), before) == 0
    assert stats.sources["char"].ratios == [1.0] * 12
    assert min(abs(ratio - 1) for ratio in stats.sources["other"].ratios) > 0.01


def test_auto_recomputes_only_for_an_inexact_sampler() -> None:
    for exact, old_policy, corrects in (
        (True, "auto", False),
        (False, "auto", True),
        (True, "learner", True),
        (False, "sampler", False),
    ):
        agent = fresh()
        stats = learner(agent, exact=exact, old_policy=old_policy).learn(six_own(agent), updates=1, seed=0)
        assert bool(stats.own.sampler_weights) == corrects
        assert (stats.sources["char"].ratios == [1.0] * 6) == corrects
    agent = fresh()
    default = Learner(agent, make_method(GSPO), LearningSettings(), SAMPLING)  # exact by default
    assert default.learn(six_own(agent), updates=1, seed=0).own.sampler_weights == []


def corrected_loss(model, one: LearnerSample, old_T: Tensor, cap: float, per_token: bool) -> Tensor:
    """Return the loss of one response in plain torch; cross responses use the source's log-probabilities."""
    now_T = plain_logprobs(model, one.prompt_ids, one.response_ids, SAMPLING)
    a = one.advantage
    if per_token:
        weights = [
            min(math.exp(o - b), cap) for o, b in zip(old_T.tolist(), one.behaviour_logprobs, strict=True)
        ]
        ratio_T = torch.exp(now_T - old_T)
        least_T = torch.minimum(ratio_T * a, ratio_T.clamp(1 - LOW, 1 + HIGH) * a)
        return -(torch.tensor(weights) * least_T).mean()
    weight = min(math.exp(old_T.sum().item() - one.behaviour_logprob), cap) if one.is_own else 1.0
    before = old_T.sum() if one.is_own else one.behaviour_logprob
    s = torch.exp((now_T.sum() - before) / one.source_length)
    return -weight * torch.minimum(s * a, s.clamp(1 - LOW, 1 + HIGH) * a)


@pytest.mark.parametrize(
    ("method", "updates", "epochs", "cap"),
    [
        (GSPO, 1, 1, 2.0),
        (GSPO, 3, 1, 1.05),
        (NAIVE, 4, 2, 1.1),  # others' responses among them; every response comes twice
        (GrpoSettings(clip_low=LOW, clip_high=HIGH), 3, 1, 1.04),
    ],
    ids=["one update", "gspo", "naive", "grpo"],
)
def test_whole_steps_equal_plain_torch(method, updates: int, epochs: int, cap: float) -> None:
    agent, plain = fresh(), fresh()
    settings = {"epochs": epochs, "mismatch_cap": cap, "micro_batch_tokens": 25, "lr": 3e-3}
    mine = learner(agent, method, **settings)
    adamw = PlainAdamW(plain.model, 3e-3, (0.9, 0.999), 0.0, 1e9)
    for step in range(2):
        samples = six_own(agent)
        if method is NAIVE:
            samples += [sample(agent, which, 0.95, 1.0, own=False) for which in (1, 3)]
            samples += [sample(agent, 5, 1.1, -1.0, own=False, retokenised=True)]
        with torch.no_grad():  # before the step's first update
            old = {
                id(s): plain_logprobs(plain.model, s.prompt_ids, s.response_ids, SAMPLING) for s in samples
            }
        stats = mine.learn(samples, updates, seed=step)
        losses = []
        for minibatch in minibatches(samples, updates, epochs, "mixed", seed=step):
            per_token = method.name == "grpo"
            terms = [corrected_loss(plain.model, s, old[id(s)], cap, per_token) for s in minibatch]
            loss = torch.stack(terms).mean()
            adamw.step(loss)
            losses.append(loss.item())
        assert stats.losses == pytest.approx(losses, rel=1e-3, abs=1e-5)
        # a hundredth of what an update moves them: Adam makes much of rounding where a gradient is almost 0
        assert largest_difference(weights(agent), weights(plain)) < 3e-5
        assert max(stats.own.sampler_weights) <= cap + 1e-6
        assert 0 < sum(stats.own.sampler_capped) < len(stats.own.sampler_capped) or cap == 2.0
        assert len(stats.own.sampler_weights) == 6 * epochs
        if updates > 1:
            assert len({round(ratio, 5) for ratio in stats.sources["char"].ratios}) > 3  # it has moved


def test_only_responses_of_later_updates_need_an_extra_pass() -> None:
    agent = fresh()
    samples = [*six_own(agent), *(replace(one, advantage=0.0) for one in six_own(agent))]
    cross = [sample(agent, which, 0.95, 1.0, own=False) for which in range(3)]
    for updates, epochs, extra in ((1, 1, 0), (3, 1, None), (2, 2, 0), (4, 2, None)):
        settings = {"epochs": epochs, "micro_batch_tokens": 1, "lr": 1e-9}
        learns = learner(agent, NAIVE, **settings)  # tries the model, so its passes are not counted below
        with counted(agent) as sizes:
            stats = learns.learn([*samples, *cross], updates, seed=0)
        used = 6 * epochs + 3 * epochs
        batches = minibatches([*samples, *cross], updates, epochs, "mixed", seed=0)
        first = {one for one in batches[0] if one.is_own and one.advantage}
        spent = 6 - len(first) if extra is None else extra
        assert extra is not None or 0 < spent < 6
        assert len(sizes) == used + spent
        assert len(stats.sampler_gaps) == sum(len(RESPONSES[which]) for which in range(6))  # each once
        assert len(stats.own.sampler_weights) == 6 * epochs


def test_without_correction_there_is_no_extra_pass() -> None:
    agent = fresh()
    samples = six_own(agent)
    learns = learner(agent, exact=True, micro_batch_tokens=1)
    with counted(agent) as sizes:
        stats = learns.learn(samples, updates=3, seed=0)
    assert len(sizes) == 6
    first = minibatches(samples, 3, 1, "mixed", seed=0)[0]
    assert len(stats.sampler_gaps) == sum(len(one.response_ids) for one in first)


@pytest.mark.parametrize("method", [GSPO, GrpoSettings()], ids=lambda settings: settings.name)
def test_the_first_updates_own_pass_gives_pi_old(method) -> None:
    agent = fresh()
    mine, samples = learner(agent, method), six_own(agent)
    before = OldPolicyLogprobs()
    with torch.no_grad():
        rows = [plain_logprobs(agent.model, s.prompt_ids, s.response_ids, SAMPLING) for s in samples]
    for one, logprobs_T in zip(samples, rows, strict=True):
        before.remember([one], logprobs_T.unsqueeze(0))
    given_BT = mine.loss_batch(samples, 0, before).behaviour_logprobs_BT
    for row, logprobs_T in zip(given_BT, rows, strict=True):
        assert torch.equal(row[: len(logprobs_T)], logprobs_T)  # a known pi_old is not recomputed
    gradients = []
    for old in (before, OldPolicyLogprobs(), None):
        loss = mine.method.loss(mine.loss_batch(samples, 0, old)).loss_B.mean()
        gradients.append(torch.autograd.grad(loss, list(agent.model.parameters())))
    for passed_before, itself, default in zip(*gradients, strict=True):
        torch.testing.assert_close(passed_before, itself, atol=1e-6, rtol=1e-4)
        assert torch.equal(itself, default)
    assert max(float(g.abs().max()) for g in gradients[0]) > 0.1
    with pytest.raises(AssertionError, match="no forward pass over this response before the update"):
        mine.loss_batch(samples, 1, OldPolicyLogprobs())  # too late


def test_cross_rows_are_not_corrected() -> None:
    agent = fresh()
    samples = [
        sample(agent, 1, 0.9, advantage=1.0, own=False),
        *six_own(agent)[2:4],
        sample(agent, 3, 0.8, advantage=1.0, own=False, retokenised=True),
    ]
    corrected = learner(agent, HacpoSettings()).loss_batch(samples, 0)
    plain = learner(agent, HacpoSettings(), exact=True).loss_batch(samples, 0)
    for name in ("logprobs_BT", "behaviour_logprobs_BT", "behaviour_logprob_B"):
        for row in (0, 3):
            assert torch.equal(getattr(corrected, name)[row], getattr(plain, name)[row])
        if name != "logprobs_BT":
            assert not torch.equal(getattr(corrected, name)[1], getattr(plain, name)[1])
    terms = make_method(HacpoSettings()).loss(corrected)
    assert terms.weight_B[[0, 3]].tolist() == [1.0, 1.0]
    assert terms.loss_B[[0, 3]].tolist() == make_method(HacpoSettings()).loss(plain).loss_B[[0, 3]].tolist()
    assert torch.equal(corrected.sampler_logprobs_BT[1:3], plain.behaviour_logprobs_BT[1:3])


def test_the_report_of_gap_and_weights() -> None:
    agent = fresh()
    stats = learner(agent, lr=1.0, mismatch_cap=1.01).learn(six_own(agent), updates=3, seed=0)
    values = [value for which in range(6) for value in noise(which)]
    reported = report(stats)  # three updates so large that a gap taken after one would be another
    assert reported.sampler_gap == pytest.approx(math.fsum(map(abs, values)) / len(values), abs=1e-5)
    assert reported.sampler_gap_max == pytest.approx(max(map(abs, values)), abs=1e-5)
    assert reported.sampler_kl == pytest.approx(math.fsum(values) / len(values), abs=1e-5)
    raw = [math.exp(-math.fsum(noise(which))) for which in range(6)]
    assert reported.sampler_weight == pytest.approx(sum(min(1.01, w) for w in raw) / 6, rel=1e-4)
    assert reported.sampler_capped == pytest.approx(sum(w > 1.01 for w in raw) / 6)
    assert 0 < reported.sampler_capped < 1


@pytest.mark.parametrize("old_policy", ["sampler", "learner"])
def test_a_step_without_own_signal_still_has_a_gap(old_policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hacrl.models.logprobs.MAX_PACKED_SHARE", 0.0)  # rows are counted
    agent = fresh()
    idle = [replace(one, advantage=0.0) for _ in range(4) for one in six_own(agent)]
    cross = [sample(agent, 1, 0.9, advantage=1.0, own=False)] * 4
    for others, own, measured, epochs in (([], idle, 8, 1), (cross, idle, 8, 1), ([], idle[:5], 5, 2)):
        settings = {"old_policy": old_policy, "lr": 1e-9, "epochs": epochs}
        learns = learner(agent, NAIVE, **settings)  # tries the model, so its passes are not counted below
        with counted(agent) as sizes:
            stats = learns.learn([*others, *own], updates=2, seed=0)
        gap = report(stats)
        # a mini-batch runs in one pass, or in none if nothing in it is learnt
        assert (sizes[0], len(sizes)) == (measured, 1 + 2 * bool(others))
        assert 0.01 < (gap.sampler_gap or 0.0) < 0.2
        assert (gap.sampler_weight, gap.sampler_capped) == (None, None)
    assert report(learner(agent, NAIVE).learn(cross, updates=1, seed=0)).sampler_gap is None
    assert report(learner(agent, NAIVE).learn([], updates=1, seed=0)).sampler_gap is None


def test_evenly_spaced_samples() -> None:
    agent = fresh()
    many = [sample(agent, 0, 1.0, float(i)) for i in range(24)]
    taken = {n: [int(one.advantage) for one in evenly_spaced(many[:n], 8)] for n in (0, 3, 8, 9, 24)}
    assert taken == {
        0: [],
        3: [0, 1, 2],
        8: [0, 1, 2, 3, 4, 5, 6, 7],
        9: [0, 2, 4, 6, 8],
        24: [0, 3, 6, 9, 12, 15, 18, 21],
    }


def test_the_gap_is_measured_before_the_first_update_even_for_later_responses() -> None:
    agent = fresh()
    own, cross = six_own(agent)[0], sample(agent, 1, 0.95, 1.0, own=False)
    seed = next(s for s in range(9) if minibatches([own, cross], 2, 1, "mixed", s)[0] == [cross])
    for old_policy in ("sampler", "learner"):
        start = fresh()
        settings = {"lr": 1.0, "old_policy": old_policy}
        stats = learner(start, NAIVE, **settings).learn([own, cross], updates=2, seed=seed)
        assert stats.sampler_differences == pytest.approx(noise(0), abs=1e-5)
        (ratio,) = stats.sources["char"].ratios
        assert abs(ratio - 1) > 0.05  # the update before it was large


@pytest.mark.parametrize("learn_stop_token", [True, False])
def test_the_stop_token_counts_if_it_is_trained_on(learn_stop_token: bool) -> None:
    """The sampler is off by .5 at the stop token alone: w = exp(-.5), or 1 if it is not part of y."""
    agent = with_logit_bias(sharpened(char_agent()), {"<eos>": 3.0})
    one, sampling = problem("12+3:"), Sampling(8)
    rollouts = [
        with_logprobs(r, (*r.token_logprobs[:-1], r.token_logprobs[-1] + 0.5))
        for r in sample_rollouts(TransformersEngine(agent), [one], 32, sampling, seed=0)
        if r.finish_reason == "stop" and r.num_tokens > 1
    ]
    assert len(rollouts) > 3
    group = PromptGroup(one, {agent.name: tuple(judged(r, i % 2) for i, r in enumerate(rollouts))})
    method = make_method(GSPO)
    builder = SampleBuilder(agent, method, learn_stop_token)
    samples = builder.build([group], lambda *_: 1.0).samples
    mine = Learner(agent, method, LearningSettings(lr=1e-9), sampling, exact_sampler=False)
    stats = mine.learn(samples, updates=2, seed=0)
    weight, gap = (math.exp(-0.5), 0.5) if learn_stop_token else (1.0, 0.0)
    assert stats.own.sampler_weights == pytest.approx([weight] * len(rollouts), abs=1e-4)
    assert report(stats).sampler_gap_max == pytest.approx(gap, abs=1e-4)
    assert len(stats.sampler_gaps) == sum(r.num_tokens - (not learn_stop_token) for r in rollouts)


def test_in_a_run_an_exact_sampler_makes_no_difference(runs: Runs) -> None:
    """Several updates a step, three steps: the old policy recomputed is the sampler's, to rounding."""
    plain, recomputed = (
        runs("char", "pair", learning={"old_policy": old, "lr": 1e-3}) for old in ("auto", "learner")
    )
    for name in ("char", "pair"):
        one, other = plain.weights(name), recomputed.weights(name)
        assert largest_difference(one, other) < 1e-4
        assert largest_difference(one, runs.initial_weights(name)) > 1e-3
        for step in plain.of(name):
            assert (step["learning"]["sampler_weight"], step["learning"]["sampler_capped"]) == (None, None)
            assert step["learning"]["sampler_gap"] < 1e-5
        for step in recomputed.of(name):
            assert step["learning"]["sampler_weight"] in (None, pytest.approx(1.0, abs=1e-5))
            assert step["learning"]["sampler_gap_max"] < 1e-4
        assert any(step["learning"]["sampler_weight"] is not None for step in recomputed.of(name))
