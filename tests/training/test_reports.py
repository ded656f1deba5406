"""Reports of a step, by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from hacrl.engines.answering import verify_rollouts
from hacrl.training.learn_stats import LearnStats, SourceStats
from hacrl.training.metrics import (
    LearnReport,
    RetokeniseReport,
    RolloutReport,
    SourceReport,
    learn_report,
    rollout_report,
)
from hacrl.training.samples import LearnerSamples
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
    )


def test_the_learn_report() -> None:
    stats = LearnStats(
        losses=[0.5, -0.1],
        grad_norms=[3.0, 1.0],
        skipped=7,
        sources={
            "bob": SourceStats(
                ratios=[0.9, 0.7, 1.1],
                clipped=[0.0, 1.0, 0.5],
                clipped_above=[0.0, 0.0, 0.5],
                gradients=[0.25, 0.0, 0.5],
                source_length_ratios=[0.9, 0.7, 1.1],
                own_length_ratios=[0.8, 0.6, 0.7],
            ),
            "ada": SourceStats([1.0], [0.0], [0.0], [0.25], [1.0], [1.0]),
        },
        sampler_differences=[0.25, -0.5, 0.75, 0.5],
        sampler_weights=[0.5, 2.0, 1.0],
        sampler_capped=[0.0, 1.0, 0.0],
        bad_updates=3,
        oom_retries=1,
        learning_rate=2e-6,
        notes=["something to know"],
    )
    dropped = Counter({("bob", "too_long"): 2, ("ada", "non_finite"): 1, ("bob", "not_representable"): 3})
    left_out = Counter({"carl": 6, "bob": 4})
    samples = LearnerSamples(dropped=dropped, length_ratios={"bob": [0.5, 0.7]}, left_out=left_out)
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
            "ada": SourceReport(1, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, gradient=0.25),  # of 0.25 + 0.75
            "bob": SourceReport(
                used=3,
                ratio_mean=pytest.approx(0.9),
                ratio_min=0.7,
                ratio_max=1.1,
                ratio_by_source_length=pytest.approx(0.9),
                ratio_by_own_length=pytest.approx(0.7),
                clipped=pytest.approx(0.5),
                clipped_above=pytest.approx(0.5 / 3),
                gradient=0.75,
            ),
        },
        # 2 of the 5 that were tried came back as the same text
        retokenised={"bob": RetokeniseReport(2, 0.4, pytest.approx(0.6))},
        bad_updates=3,
        oom_retries=1,
        learning_rate=2e-6,
        left_out={"bob": 4, "carl": 6},
        notes=("something to know",),
    )


def test_a_step_without_any_sample_is_all_zeros() -> None:
    nothing = LearnReport(0, 0.0, 0.0, 0, {}, None, None, None, None, None, {}, {}, 0, 0)
    assert learn_report("ada", LearnStats(), LearnerSamples()) == nothing
