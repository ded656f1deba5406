"""Defaults follow the paper; values without a meaning are refused with a message that names them."""

from __future__ import annotations

import pytest

from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, MethodSettings, NaiveSettings


def test_defaults_of_the_paper() -> None:
    grpo, gspo, naive, hacpo = GrpoSettings(), GspoSettings(), NaiveSettings(), HacpoSettings()
    assert (grpo.clip_low, grpo.clip_high) == (0.2, 0.28)
    for settings in (gspo, naive, hacpo):
        assert (settings.clip_low, settings.clip_high) == (0.0003, 0.0004)
    for settings in (grpo, gspo, naive, hacpo):
        assert settings.kl_coefficient == 0.0
        assert (settings.capability.window, settings.capability.floor) == (5, 1e-8)
        assert (settings.capability.ratio_min, settings.capability.ratio_max) == (0.1, 10.0)
        assert settings.capability.measure == "mean_reward"
        assert (settings.std.unbiased, settings.std.epsilon) == (True, 1e-6)
    assert [s.shares_rollouts for s in (grpo, gspo, naive, hacpo)] == [False, False, True, True]
    assert (hacpo.delta, hacpo.cross_upper) == (0.2, 1.0)
    assert (hacpo.cross_baseline, hacpo.ratio_length, hacpo.exponent_on) == ("source", "source", "clipped")
    assert (hacpo.baseline_overshoot, hacpo.max_reward) == ("own_mean", None)
    assert hacpo.capability_baseline
    assert hacpo.discrepancy
    assert hacpo.cross_clip


@pytest.mark.parametrize("settings_type", [GrpoSettings, GspoSettings, NaiveSettings, HacpoSettings])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low must be in \[0, 1\), not -0.1"),
        ({"clip_low": 1.0}, r"clip_low must be in \[0, 1\), not 1.0"),
        ({"clip_high": -0.1}, "clip_high must not be negative, not -0.1"),
        ({"kl_coefficient": -0.001}, "kl_coefficient must not be negative, not -0.001"),
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
