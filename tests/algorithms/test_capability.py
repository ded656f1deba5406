"""Capability P_k and capability ratio omega (eq. 8, 9), with numbers worked out by hand."""

from __future__ import annotations

import json

import pytest

from hacrl.algorithms.capability import CapabilityTracker, batch_capability
from hacrl.config.schema import GspoSettings, HacpoSettings


def tracker_with(steps: dict[str, list[float]], **settings) -> CapabilityTracker:
    """A tracker that saw the given batch-mean rewards, one batch of one reward a step."""
    tracker = CapabilityTracker(list(steps), **settings)
    for values in zip(*steps.values(), strict=True):
        tracker.record({agent: [value] for agent, value in zip(steps, values, strict=True)})
    return tracker


def test_measures_of_one_batch() -> None:
    rewards = [1.0, 0.0, 0.5, -1.0, 0.0]
    # (1 + 0 + 0.5 - 1 + 0) / 5 = 0.1; two of five are positive (0 is not): 0.4
    assert batch_capability(rewards) == pytest.approx(0.1)
    assert batch_capability(rewards, "mean_reward") == pytest.approx(0.1)
    assert batch_capability(rewards, "positive_share") == 0.4


def test_tracker_uses_the_chosen_measure() -> None:
    rewards = {"a": [0.2, 0.2, 0.2, 0.0], "b": [1.0, 1.0, 0.0, 0.0]}
    by_mean = CapabilityTracker(["a", "b"])
    by_share = CapabilityTracker(["a", "b"], measure="positive_share")
    by_mean.record(rewards)
    by_share.record(rewards)
    # means 0.6 / 4 = 0.15 and 0.5; shares 3/4 and 2/4: the measures even disagree on who is better
    assert by_mean.ratio("a", "b") == pytest.approx(0.3)
    assert by_share.ratio("a", "b") == pytest.approx(1.5)


def test_a_methods_settings_make_its_tracker() -> None:
    steps = {"a": [0.2, 0.4, 0.8]}

    def capability(settings) -> float:
        tracker = CapabilityTracker.of(["a"], settings)
        for value in steps["a"]:
            tracker.record({"a": [value, 0.0]})
        return tracker.capability("a")

    # means 0.1 0.2 0.4; the last two: 0.3; from -1: 1.3; half of the rewards of every step are positive
    assert capability(HacpoSettings()) == pytest.approx(0.7 / 3)
    assert capability(HacpoSettings(capability_window=2)) == pytest.approx(0.3)
    assert capability(GspoSettings(capability_window=2, reward_range=(-1.0, 1.0))) == pytest.approx(1.3)
    assert capability(HacpoSettings(capability_measure="positive_share")) == 0.5
    assert capability(HacpoSettings(reading="public")) == 0.5


def test_ratio_is_first_over_second() -> None:
    tracker = tracker_with({"a": [0.6], "b": [0.2]})
    assert tracker.ratio("a", "b") == pytest.approx(3.0)
    assert tracker.ratio("b", "a") == pytest.approx(1 / 3)
    assert tracker.ratio("a", "a") == 1.0


def test_equal_before_the_first_step() -> None:
    tracker = CapabilityTracker(["a", "b", "c"])
    assert [tracker.ratio(k, j) for k in "abc" for j in "abc"] == [1.0] * 9


def test_mean_over_the_steps_so_far_while_the_window_fills() -> None:
    # two of five steps seen: (0.2 + 0.4) / 2 = 0.3, not / 5
    assert tracker_with({"a": [0.2, 0.4]}).capability("a") == pytest.approx(0.3)


def test_mean_over_the_window_not_over_all_history() -> None:
    # K = 2 of 0.2, 0.4, 0.8: (0.4 + 0.8) / 2 = 0.6; over everything it would be 1.4 / 3 = 0.467
    assert tracker_with({"a": [0.2, 0.4, 0.8]}, window=2).capability("a") == pytest.approx(0.6)
    # K = 1: only the last
    assert tracker_with({"a": [0.2, 0.4, 0.8]}, window=1).capability("a") == 0.8


def test_default_window_is_five_steps() -> None:
    # the 5th step keeps the first (0.9 + 4 * 0.1) / 5 = 0.26, the 6th pushes it out
    assert tracker_with({"a": [0.9] + [0.1] * 4}).capability("a") == pytest.approx(0.26)
    assert tracker_with({"a": [0.9] + [0.1] * 5}).capability("a") == pytest.approx(0.1)


def test_steps_have_equal_weight_for_any_number_of_rewards() -> None:
    tracker = CapabilityTracker(["a"])
    tracker.record({"a": [1.0]})
    tracker.record({"a": [0.0, 0.0, 0.0, 1.0]})
    # (1 + 0.25) / 2; pooling the five rewards would give 2 / 5
    assert tracker.capability("a") == 0.625


def test_floor_holds_for_each_step_not_for_the_window() -> None:
    # (max(0, 0.1) + 0.4) / 2 = 0.25; flooring the window's mean of 0.2 would leave 0.2
    assert tracker_with({"a": [0.0, 0.4]}, floor=0.1).capability("a") == 0.25
    # a negative mean reward is floored too
    assert tracker_with({"a": [-0.5, 0.4]}, floor=0.1).capability("a") == 0.25


def test_default_floor_and_clamp() -> None:
    tracker = tracker_with({"never": [0.0, 0.0], "half": [0.5, 0.5]})
    assert tracker.capability("never") == 1e-8
    # 1e-8 / 0.5 = 2e-8 and 0.5 / 1e-8 = 5e7, clamped to [0.1, 10]
    assert tracker.ratio("never", "half") == 0.1
    assert tracker.ratio("half", "never") == 10.0
    # two agents that never succeed are equal
    assert tracker_with({"a": [0.0], "b": [0.0]}).ratio("a", "b") == 1.0


def test_clamp_is_configurable_and_leaves_the_inside_alone() -> None:
    tracker = tracker_with({"a": [0.9], "b": [0.3], "c": [0.5]}, ratio_min=0.5, ratio_max=2.0)
    assert tracker.ratio("a", "b") == 2.0  # 3 clamped
    assert tracker.ratio("b", "a") == 0.5  # 1/3 clamped
    assert tracker.ratio("a", "c") == pytest.approx(1.8)
    assert tracker.ratio("b", "c") == pytest.approx(0.6)


@pytest.mark.parametrize(
    "rewards", [{"a": [1.0]}, {"a": [1.0], "b": [1.0], "c": [1.0]}, {"a": [1.0], "x": [1.0]}]
)
def test_record_refuses_other_agents(rewards: dict[str, list[float]]) -> None:
    tracker = tracker_with({"a": [0.5], "b": [0.25]})
    with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
        tracker.record(rewards)
    assert tracker.ratio("a", "b") == 2.0  # and nothing was recorded


def test_an_agent_without_rewards_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one reward"):
        CapabilityTracker(["a", "b"]).record({"a": [1.0], "b": []})


def test_state_survives_json_and_the_window_goes_on() -> None:
    steps = {"a": [0.1, 0.7, 0.3], "b": [0.9, 0.2, 0.0]}
    saved = tracker_with(steps, window=3)
    text = json.dumps(saved.state_dict())
    restored = CapabilityTracker(["a", "b"], window=3)
    restored.load_state_dict(json.loads(text))
    assert restored.ratio("a", "b") == saved.ratio("a", "b")
    restored.record({"a": [0.5], "b": [0.4]})
    # the first step falls out: a = (0.7 + 0.3 + 0.5) / 3 = 0.5, b = (0.2 + 1e-8 + 0.4) / 3 = 0.2
    assert restored.capability("a") == pytest.approx(0.5, rel=1e-12)
    assert restored.capability("b") == pytest.approx(0.2, rel=1e-7)


def test_a_smaller_window_keeps_the_newest_steps_of_a_saved_one() -> None:
    restored = CapabilityTracker(["a"], window=2)
    restored.load_state_dict(tracker_with({"a": [0.1, 0.3, 0.5]}).state_dict())
    assert restored.capability("a") == pytest.approx(0.4)


def test_saved_state_does_not_change_with_the_tracker() -> None:
    tracker = tracker_with({"a": [0.25]})
    state = tracker.state_dict()
    tracker.record({"a": [0.75]})
    assert state == {"a": [0.25]}


def test_state_of_other_agents_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\['a', 'c'\].*\['a', 'b'\]"):
        CapabilityTracker(["a", "b"]).load_state_dict({"a": [0.5], "c": [0.5]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1 step, not 0"),
        ({"floor": 0.0}, "floor must be positive, not 0.0"),
        ({"floor": -1e-8}, "floor must be positive"),
        ({"ratio_min": 0.0}, "ratio_min=0.0"),
        ({"ratio_min": 1.5}, "ratio_min=1.5"),
        ({"ratio_max": 0.9}, "ratio_max=0.9"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CapabilityTracker(["a"], **options)


def test_negative_rewards_are_measured_from_the_lowest() -> None:
    """Rewards in [-1, 1]: without min_reward both agents would be at the floor, and equal."""
    rewards = {"a": [1.0, -1.0, -1.0, -1.0], "b": [-1.0, -1.0, -1.0, -0.2]}
    tracker = CapabilityTracker(["a", "b"], min_reward=-1.0)
    tracker.record(rewards)
    # a: -2 / 4 + 1 = 0.5; b: -3.2 / 4 + 1 = 0.2
    assert tracker.capability("a") == pytest.approx(0.5)
    assert tracker.capability("b") == pytest.approx(0.2)
    assert tracker.ratio("a", "b") == pytest.approx(2.5)
    assert tracker.ratio("b", "a") == pytest.approx(0.4)
    plain = CapabilityTracker(["a", "b"])
    plain.record(rewards)
    assert (plain.capability("a"), plain.capability("b"), plain.ratio("a", "b")) == (1e-8, 1e-8, 1.0)


def test_the_lowest_reward_may_be_above_zero() -> None:
    # rewards of 1 to 5, e.g. from a judge: (3 + 2) / 2 - 1 = 1.5 against (5 + 3) / 2 - 1 = 3
    tracker = CapabilityTracker(["a", "b"], min_reward=1.0)
    tracker.record({"a": [3.0, 2.0], "b": [5.0, 3.0]})
    assert tracker.ratio("a", "b") == pytest.approx(0.5)
    assert batch_capability([3.0, 2.0], "mean_reward", 1.0) == 1.5


def test_rewards_below_the_lowest_end_at_the_floor() -> None:
    tracker = CapabilityTracker(["a"], min_reward=-1.0, floor=0.01)
    tracker.record({"a": [-3.0, -2.0]})  # -2.5 + 1 = -1.5
    assert tracker.capability("a") == 0.01


def test_each_step_is_measured_from_the_lowest() -> None:
    # -0.5 + 1 = 0.5 and 0.5 + 1 = 1.5: mean 1.0; once for the whole window it would be the same,
    # but not at the floor: -2 + 1 is 0 for its step, (0 + 1.5) / 2 = 0.75
    assert tracker_with({"a": [-0.5, 0.5]}, min_reward=-1.0).capability("a") == pytest.approx(1.0)
    assert tracker_with({"a": [-2.0, 0.5]}, min_reward=-1.0).capability("a") == pytest.approx(0.75)


def test_the_share_of_positive_rewards_needs_no_lowest() -> None:
    assert batch_capability([1.0, -1.0, -1.0, 0.0], "positive_share", -1.0) == 0.25
