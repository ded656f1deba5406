"""Defaults follow the paper; values without a meaning are refused with a message that names them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, MethodSettings, NaiveSettings


def test_defaults_of_the_paper() -> None:
    grpo, gspo, naive, hacpo = GrpoSettings(), GspoSettings(), NaiveSettings(), HacpoSettings()
    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.28)
    for settings in (gspo, naive, hacpo):
        assert (settings.clip_low, settings.clip_high) == (0.0003, 0.0004)
    for settings in (grpo, gspo, naive, hacpo):
        assert settings.choices.kl_coefficient == 0.0
        assert (settings.capability_window, settings.choices.capability_measure) == (5, "mean_reward")
        assert (settings.choices.learn_stop_token, settings.choices.minibatch_order) == (True, "mixed")
        assert (settings.min_reward, settings.max_reward) == (0.0, None)
    assert [s.shares_rollouts for s in (grpo, gspo, naive, hacpo)] == [False, False, True, True]
    assert (hacpo.delta, hacpo.cross_upper) == (0.2, 1.0)
    assert (hacpo.choices.cross_baseline, hacpo.choices.ratio_length) == ("source", "source")
    assert hacpo.baseline_overshoot == "own_mean"
    assert hacpo.capability_baseline
    assert hacpo.discrepancy
    assert hacpo.cross_clip


def test_a_reading_decides_what_is_not_set_and_a_key_that_is_set_its_own_point() -> None:
    public = HacpoSettings(reading="public").choices
    assert (public.kl_coefficient, public.capability_measure) == (0.001, "positive_share")
    assert (public.learn_stop_token, public.minibatch_order) == (False, "self_first")
    assert (public.ratio_length, public.cross_baseline) == ("own", "learner")
    one = HacpoSettings(reading="public", kl_coefficient=0.0, learn_stop_token=True, ratio_length="source")
    assert one.choices == replace(public, kl_coefficient=0.0, learn_stop_token=True, ratio_length="source")
    assert HacpoSettings(cross_baseline="learner").choices == replace(
        HacpoSettings().choices, cross_baseline="learner"
    )
    assert NaiveSettings(reading="public").choices.ratio_length == "own"
    assert GspoSettings(minibatch_order="self_first").choices.minibatch_order == "self_first"


@pytest.mark.parametrize("settings_type", [GrpoSettings, GspoSettings, NaiveSettings, HacpoSettings])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low must be in \[0, 1\), not -0.1"),
        ({"clip_low": 1.0}, r"clip_low must be in \[0, 1\), not 1.0"),
        ({"clip_high": -0.1}, "clip_high must not be negative, not -0.1"),
        ({"kl_coefficient": -0.001}, "kl_coefficient must not be negative, not -0.001"),
        ({"capability_window": 0}, "capability_window must be at least 1 step, not 0"),
        ({"reward_range": (1.0, 1.0)}, r"reward_range must rise, not \[1.0, 1.0\]"),
    ],
)
def test_common_options_out_of_range(
    settings_type: type[MethodSettings], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        settings_type(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.5}, "alpha must not be negative, not -0.5"),
        ({"delta": -0.1}, r"delta must be in \(0, 1\), not -0.1"),
        ({"delta": 1.0}, r"delta must be in \(0, 1\), not 1.0"),
        ({"delta_step": -0.01}, "delta_step must not be negative, not -0.01"),
        ({"cross_upper": 0.99}, "cross_upper must be at least 1, not 0.99"),
    ],
)
def test_hacpo_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HacpoSettings(**options)
