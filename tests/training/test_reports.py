"""Reports of a step, by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from hacrl.engines.answering import verify_rollouts
from hacrl.training.learn_stats import LearnStats, OwnStats, SourceStats
from hacrl.training.metrics import (
    LearnReport,
    RetokeniseReport,
    RolloutReport,
    SourceReport,
    learn_report,
    rollout_report,
)
from hacrl.training.samples import LearnerSamples
from hacrl.types import Problem, Rollout, Verdict, VerifiedRollout
from tests.support.rollouts import rollout
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent


def test_the_rollout_report() -> None:
    agent = char_agent()
    texts = [("7", True), ("17", False), ("111", True), ("", True)]
    verified = verify_rollouts(SevensTask(), [rollout(agent, text, stopped) for text, stopped in texts])
    # tokens with stop: 2, 2, 4, 1; rewards 1, 1, 0, 0; three of four stopped
    assert rollout_report(verified) == RolloutReport(
        reward=0.5,
        verdicts={"correct": 2, "unparsable": 1, "wrong": 1},
        response_tokens=2.25,
        stopped=0.75,
        rollouts=4,
        tokens=9,
        # token t has log-probability -0.25 * (t + 1): .25 * (3 + 3 + 10 + 1) over 9 tokens
        entropy=pytest.approx(4.25 / 9),
        all_right=0.0,
        all_wrong=0.0,
    )


def test_prompts_without_variance() -> None:
    """Of four prompts, one is always solved, one never, and two sometimes; rewards start at -1."""
    rewards = {"a": (1.0, 1.0), "b": (-1.0, -1.0), "c": (1.0, -1.0), "d": (-1.0, 0.5)}
    verified = [
        VerifiedRollout(
            Rollout.single_turn(Problem(name, name, "7"), "ada", "7", (1,), (-0.5,), "stop", 0, ""),
            Verdict(reward, "scored"),
        )
        for name, pair in rewards.items()
        for reward in pair
    ]
    report = rollout_report(verified, min_reward=-1.0)
    assert (report.all_right, report.all_wrong) == (0.25, 0.25)
    # counted from 0, a reward of -1 is still the lowest kind
    assert rollout_report(verified).all_wrong == 0.25


def test_the_learn_report() -> None:
    stats = LearnStats(
        losses=[0.5, -0.1],
        grad_norms=[3.0, 1.0],
        skipped=7,
        sources={
            "bob": SourceStats(
                ratios=[0.9, 0.7, 1.1],
                clipped_below=[0.0, 1.0, 0.0],
                clipped_above=[0.0, 0.0, 0.5],
                gradients=[0.25, 0.0, 0.5],
                source_length_ratios=[0.9, 0.7, 1.1],
                own_length_ratios=[0.8, 0.6, 0.7],
                tokens=30,
            ),
            "ada": SourceStats([1.0], [0.0], [0.0], [0.25], [1.0], [1.0], 12),
        },
        sampler_differences=[0.25, -0.5, 0.75, 0.5],
        own=OwnStats(
            policy_kls=[0.1, 0.3],
            reference_kls=[0.5],
            later_clipped=[1.0, 0.0, 0.0, 0.0],
            sampler_weights=[0.5, 2.0, 1.0],
            sampler_capped=[0.0, 1.0, 0.0],
        ),
        bad_updates=3,
        oom_retries=1,
        learning_rate=2e-6,
        notes=["something to know"],
    )
    dropped = Counter({("bob", "too_long"): 2, ("ada", "non_finite"): 1, ("bob", "not_representable"): 3})
    left_out = Counter({"carl": 6, "bob": 4})
    samples = LearnerSamples(
        dropped=dropped,
        length_ratios={"bob": [0.5, 0.7]},
        left_out=left_out,
        baselines=[0.25, 0.75],
        has_signal=[True, False, False, True, True],
    )
    assert learn_report("ada", stats, samples) == LearnReport(
        updates=2,
        loss=pytest.approx(0.2),
        grad_norm=2.0,
        skipped=7,
        dropped={"ada": {"non_finite": 1}, "bob": {"not_representable": 3, "too_long": 2}},
        sampler_gap=0.5,  # 2 / 4
        sampler_gap_max=0.75,
        sampler_kl=0.25,  # 1 / 4
        sampler_weight=pytest.approx(3.5 / 3),
        sampler_capped=pytest.approx(1 / 3),
        sources={
            "ada": SourceReport(1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.25, 12),  # .25 of .25 + .75
            "bob": SourceReport(
                used=3,
                ratio_mean=pytest.approx(0.9),
                ratio_min=0.7,
                ratio_max=1.1,
                ratio_by_source_length=pytest.approx(0.9),
                ratio_by_own_length=pytest.approx(0.7),
                clipped=pytest.approx(0.5),
                clipped_below=pytest.approx(1 / 3),
                clipped_above=pytest.approx(0.5 / 3),
                gradient=0.75,
                tokens=30,
            ),
        },
        # 2 of the 5 that were tried came back as the same text
        retokenised={"bob": RetokeniseReport(2, 0.4, pytest.approx(0.6))},
        bad_updates=3,
        oom_retries=1,
        learning_rate=2e-6,
        tokens=42,
        policy_kl=pytest.approx(0.2),
        reference_kl=0.5,
        own_clipped_later=0.25,
        baseline=0.5,
        without_signal=0.4,
        left_out={"bob": 4, "carl": 6},
        notes=("something to know",),
    )


def test_a_step_without_any_sample_is_all_zeros() -> None:
    nothing = LearnReport(0, 0.0, 0.0, 0, {}, None, None, None, None, None, {}, {}, 0, 0)
    assert learn_report("ada", LearnStats(), LearnerSamples()) == nothing
