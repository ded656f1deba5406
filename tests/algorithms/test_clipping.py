"""Asymmetric and stepwise clipping (eq. 13, 14), and the check of its schedule."""

from __future__ import annotations

import pytest
import torch

from hacrl.algorithms.clipping import clip_cross_agent, clip_own, stepwise_lower_bound
from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, NaiveSettings, check_schedule


@pytest.mark.parametrize(
    ("delta", "delta_step", "updates_done", "expected"),
    [
        (0.2, 0.025, 0, 0.8),
        (0.2, 0.025, 1, 0.825),  # 1 - 0.2 + 0.025
        (0.2, 0.025, 3, 0.875),  # 1 - 0.2 + 0.075
        (0.1, 0.01, 3, 0.93),  # 1 - 0.1 + 0.03
        (0.2, 0.0, 7, 0.8),  # no schedule
    ],
)
def test_lower_bound(delta: float, delta_step: float, updates_done: int, expected: float) -> None:
    assert stepwise_lower_bound(delta, delta_step, updates_done) == pytest.approx(expected, rel=1e-12)


def test_cross_ratios_are_clipped_and_lose_their_gradient_outside() -> None:
    ratio = torch.tensor([0.5, 0.8, 0.9, 1.0, 1.2], dtype=torch.float64, requires_grad=True)
    clipped = clip_cross_agent(ratio, 0.8, 1.0)
    assert clipped.tolist() == [0.8, 0.8, 0.9, 1.0, 1.0]
    (grad,) = torch.autograd.grad(clipped.sum(), ratio)
    # the interval is closed: a copy of the learner (s = 1) still teaches
    assert grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


def test_own_ratios_are_clipped_around_one() -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.2, 1.5], dtype=torch.float64, requires_grad=True)
    clipped = clip_own(ratio, 0.2, 0.28)
    assert clipped.tolist() == pytest.approx([0.8, 0.9, 1.0, 1.2, 1.28], rel=1e-15)
    (grad,) = torch.autograd.grad(clipped.sum(), ratio)
    assert grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("updates", [1, 2, 4, 8])
def test_paper_schedule_lasts_for_eight_updates(updates: int) -> None:
    # the 8th update has u = 7: 0.8 + 7 * 0.025 = 0.975 < 1
    check_schedule(0.2, 0.025, 1.0, updates)
    HacpoSettings().check_updates(updates)


@pytest.mark.parametrize("updates", [9, 12])
def test_paper_schedule_is_refused_from_the_ninth_update_on(updates: int) -> None:
    # the 9th update has u = 8: 0.8 + 8 * 0.025 = 1.0, nothing below the upper bound is left
    with pytest.raises(ValueError, match=f"empty from update 9 of {updates} on") as error:
        HacpoSettings().check_updates(updates)
    message = str(error.value)
    for part in ("delta=0.2", "delta_step=0.025", "upper=1.0"):
        assert part in message


def test_refusal_names_the_last_bound_and_a_step_that_would_do() -> None:
    # u = 10 at the 11th update: 0.8 + 0.25 = 1.05; 0.2 / 10 = 0.02 is the limit
    with pytest.raises(ValueError, match=r"last lower bound 1\.05\): use delta_step below 0\.02,"):
        check_schedule(0.2, 0.025, 1.0, 11)
    check_schedule(0.2, 0.0199, 1.0, 11)
    with pytest.raises(ValueError, match="empty"):
        check_schedule(0.2, 0.02, 1.0, 11)


def test_a_higher_upper_bound_leaves_room() -> None:
    # up to 1.05: u = 9 gives 1.025, u = 10 gives 1.05
    check_schedule(0.2, 0.025, 1.05, 10)
    # the advice too: (1.05 - 0.8) / 10 = 0.025
    with pytest.raises(ValueError, match=r"empty from update 11 of 11 on .* delta_step below 0\.025,"):
        check_schedule(0.2, 0.025, 1.05, 11)
    HacpoSettings(cross_upper=1.05).check_updates(10)


def test_schedules_that_never_close() -> None:
    check_schedule(0.2, 0.0, 1.0, 1000)
    HacpoSettings(cross_clip=False).check_updates(1000)  # nothing is clipped, nothing can be empty
    for settings in (GrpoSettings(), GspoSettings(), NaiveSettings()):
        settings.check_updates(1000)


@pytest.mark.parametrize(
    ("delta", "delta_step", "upper", "first_empty"),
    [
        (0.33, 0.03, 1.0, 12),  # 0.67 + 11 * 0.03 = 1; in floating point 0.9999999999999999
        (0.05, 0.01, 1.1, 16),  # 0.95 + 15 * 0.01 = 1.1; in floating point 1.0999999999999999
    ],
)
def test_rounding_does_not_hide_an_empty_interval(
    delta: float, delta_step: float, upper: float, first_empty: int
) -> None:
    check_schedule(delta, delta_step, upper, first_empty - 1)
    with pytest.raises(ValueError, match=f"empty from update {first_empty}"):
        check_schedule(delta, delta_step, upper, first_empty)
