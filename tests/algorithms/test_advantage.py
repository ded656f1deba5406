"""Capability-aware advantage and discrepancy coefficient (eq. 6, 7, 10), by hand."""

from __future__ import annotations

import math

import pytest

from hacrl.algorithms.advantage import Normaliser, capability_aware_baseline, equal_capability, joint_std
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GrpoSettings, GspoSettings, HacpoSettings, NaiveSettings
from hacrl.tasks.verdicts import LARGEST_REWARD

EXACT_STD = Normaliser(unbiased=False, epsilon=0.0)
# Pooled rewards 1 0 1 1 0 1 0 0: mean 1/2, squared deviations 8 * 1/4 = 2, biased std sqrt(2/8) = 1/2.
TWO = {"a": (1.0, 0.0, 1.0, 1.0), "b": (0.0, 1.0, 0.0, 0.0)}


def ratio_of(**capabilities: float):
    """omega(k, j) = P_k / P_j of fixed capabilities."""
    return lambda k, j: capabilities[k] / capabilities[j]


def hacpo(rewards, learner: str, ratio, **options):
    normaliser = options.pop("normaliser", EXACT_STD)
    method = make_method(HacpoSettings(**options), normaliser=normaliser)
    return method.advantages(rewards, learner, ratio)


def test_baseline_of_two_agents() -> None:
    ratio = ratio_of(a=0.6, b=0.3)
    # means 0.75 and 0.25; mu_a = (0.75 + 2 * 0.25) / 2 = 0.625, mu_b = (0.5 * 0.75 + 0.25) / 2 = 0.3125
    assert capability_aware_baseline(TWO, "a", ratio) == pytest.approx(0.625)
    assert capability_aware_baseline(TWO, "b", ratio) == pytest.approx(0.3125)


def test_baseline_of_three_agents_weighs_agents_equally_whatever_their_number_of_responses() -> None:
    rewards = {"a": (1.0, 0.0), "b": (0.0, 0.0, 1.0, 0.0), "c": (1.0,)}
    ratio = ratio_of(a=0.6, b=0.2, c=0.8)
    # means 1/2, 1/4, 1
    # mu_a = (1/2 + 3 * 1/4 + 3/4 * 1) / 3 = 2/3      (by response: (1 + 3 * 1 + 3/4 * 1) / 7 = 0.679)
    # mu_b = (1/3 * 1/2 + 1/4 + 1/4 * 1) / 3 = 2/9
    # mu_c = (4/3 * 1/2 + 4 * 1/4 + 1) / 3 = 8/9
    assert capability_aware_baseline(rewards, "a", ratio) == pytest.approx(2 / 3)
    assert capability_aware_baseline(rewards, "b", ratio) == pytest.approx(2 / 9)
    assert capability_aware_baseline(rewards, "c", ratio) == pytest.approx(8 / 9)


def test_joint_std_pools_all_responses() -> None:
    assert joint_std(TWO, unbiased=False) == 0.5
    assert joint_std(TWO) == pytest.approx(math.sqrt(2 / 7))  # N - 1 by default
    # unequal G: 1 0 1, mean 2/3, squared deviations 1/9 + 4/9 + 1/9 = 2/3
    assert joint_std({"a": (1.0, 0.0), "b": (1.0,)}) == pytest.approx(math.sqrt(1 / 3))
    assert joint_std({"a": (1.0, 0.0), "b": (1.0,)}, unbiased=False) == pytest.approx(math.sqrt(2 / 9))


def test_joint_std_of_the_largest_rewards() -> None:
    # 1e100 and -1e100: mean 0, squares 1e200 each, 2e200 / 1; the squares of 1e155 would not be finite
    largest = {"a": (LARGEST_REWARD, -LARGEST_REWARD)}
    assert joint_std(largest) == pytest.approx(math.sqrt(2) * 1e100)
    # GSPO: +-1e100 / (sqrt(2) * 1e100) = +-1 / sqrt(2)
    advantages = make_method(GspoSettings()).advantages(largest, "a", equal_capability)
    assert advantages["a"] == pytest.approx((math.sqrt(0.5), -math.sqrt(0.5)))


def test_std_of_a_single_response_is_zero() -> None:
    assert joint_std({"a": (0.7,)}) == 0.0
    assert joint_std({"a": (0.7,)}, unbiased=False) == 0.0


def test_hacpo_advantages_of_the_learner_and_of_a_weaker_source() -> None:
    # mu_a = 0.625, mu_b = 0.3125 as above; sigma = 1/2
    # learner a: own (1 - 0.625) / 0.5 = 0.75, (0 - 0.625) / 0.5 = -1.25
    #   b's own A: (0 - 0.3125) / 0.5 = -0.625, (1 - 0.3125) / 0.5 = 1.375; times omega(b, a) = 1/2
    advantages = hacpo(TWO, "a", ratio_of(a=0.6, b=0.3))
    assert advantages["a"] == pytest.approx((0.75, -1.25, 0.75, 0.75))
    assert advantages["b"] == pytest.approx((-0.3125, 0.6875, -0.3125, -0.3125))


def test_hacpo_advantages_of_a_stronger_source() -> None:
    # learner b: own as above; a's own A times omega(a, b) = 2
    advantages = hacpo(TWO, "b", ratio_of(a=0.6, b=0.3))
    assert advantages["b"] == pytest.approx((-0.625, 1.375, -0.625, -0.625))
    assert advantages["a"] == pytest.approx((1.5, -2.5, 1.5, 1.5))


def test_without_discrepancy_cross_advantages_are_the_sources_own() -> None:
    for learner in TWO:
        advantages = hacpo(TWO, learner, ratio_of(a=0.6, b=0.3), discrepancy=False)
        assert advantages["a"] == pytest.approx((0.75, -1.25, 0.75, 0.75))
        assert advantages["b"] == pytest.approx((-0.625, 1.375, -0.625, -0.625))


def test_cross_baseline_of_the_learner() -> None:
    # learner a judges b's responses by mu_a: (0 - 0.625) / 0.5 = -1.25, (1 - 0.625) / 0.5 = 0.75; times 1/2
    advantages = hacpo(TWO, "a", ratio_of(a=0.6, b=0.3), cross_baseline="learner")
    assert advantages["a"] == pytest.approx((0.75, -1.25, 0.75, 0.75))
    assert advantages["b"] == pytest.approx((-0.625, 0.375, -0.625, -0.625))


def test_without_capability_baseline_omega_is_one_in_the_baseline_only() -> None:
    # mu = (0.75 + 0.25) / 2 = 0.5 for both: A = +1 or -1; b's still times omega(b, a) = 1/2
    advantages = hacpo(TWO, "a", ratio_of(a=0.6, b=0.3), capability_baseline=False)
    assert advantages["a"] == pytest.approx((1.0, -1.0, 1.0, 1.0))
    assert advantages["b"] == pytest.approx((-0.5, 0.5, -0.5, -0.5))


def test_default_normaliser_is_unbiased_plus_a_millionth() -> None:
    advantages = make_method(HacpoSettings()).advantages(TWO, "a", ratio_of(a=0.6, b=0.3))
    assert advantages["a"][0] == pytest.approx(0.375 / (math.sqrt(2 / 7) + 1e-6), rel=1e-12)


def test_epsilon_is_added_to_the_std() -> None:
    # 0.5 + 1.5 = 2: (1 - 0.625) / 2 = 0.1875
    std = Normaliser(unbiased=False, epsilon=1.5)
    assert hacpo(TWO, "a", ratio_of(a=0.6, b=0.3), normaliser=std)["a"][0] == pytest.approx(0.1875)
    # GSPO: own mean 0.75, biased std of 1 0 1 1 = sqrt(3)/4 = 0.4330
    gspo = make_method(GspoSettings(), normaliser=std).advantages(TWO, "a", equal_capability)
    assert gspo["a"][0] == pytest.approx(0.25 / (math.sqrt(3) / 4 + 1.5))


def test_a_negative_epsilon_is_refused() -> None:
    with pytest.raises(ValueError, match=r"epsilon must not be negative, not -0.1"):
        Normaliser(epsilon=-0.1)


OVERSHOOT = {"a": (1.0, 1.0, 1.0, 0.0), "b": (1.0, 1.0, 0.0, 1.0)}


def test_a_baseline_above_the_largest_reward_falls_back_to_the_own_mean() -> None:
    ratio = ratio_of(a=0.6, b=0.3)
    # mu_a = (0.75 + 2 * 0.75) / 2 = 1.125 > 1 -> 0.75; mu_b = (0.5 * 0.75 + 0.75) / 2 = 0.5625 stays
    assert capability_aware_baseline(OVERSHOOT, "a", ratio) == 0.75
    assert capability_aware_baseline(OVERSHOOT, "b", ratio) == pytest.approx(0.5625)
    assert capability_aware_baseline(OVERSHOOT, "a", ratio, "keep") == pytest.approx(1.125)
    assert capability_aware_baseline(OVERSHOOT, "a", ratio, max_reward=1.5) == pytest.approx(1.125)
    assert capability_aware_baseline(OVERSHOOT, "a", ratio, max_reward=1.1) == 0.75


def test_a_baseline_at_the_largest_reward_is_kept() -> None:
    # mu_a = (0.5 + 2 * 0.75) / 2 = 1 exactly: not above
    rewards = {"a": (1.0, 0.0), "b": (1.0, 1.0, 0.0, 1.0)}
    assert capability_aware_baseline(rewards, "a", ratio_of(a=0.5, b=0.25)) == 1.0


def test_overshoot_options_of_the_method() -> None:
    ratio = ratio_of(a=0.6, b=0.3)
    sigma = math.sqrt(8 * 0.1875 / 8)  # mean 3/4, every squared deviation averages 3/16
    own_mean = hacpo(OVERSHOOT, "a", ratio)["a"]
    keep = hacpo(OVERSHOOT, "a", ratio, baseline_overshoot="keep")["a"]
    larger = hacpo(OVERSHOOT, "a", ratio, reward_range=(0.0, 2.0))["a"]
    assert own_mean == pytest.approx(((1 - 0.75) / sigma,) * 3 + (-0.75 / sigma,))
    assert keep == pytest.approx(((1 - 1.125) / sigma,) * 3 + (-1.125 / sigma,))
    assert larger == keep


def test_a_baseline_at_the_highest_reward_does_not_fall_back_by_rounding() -> None:
    # means 0, 1, 1/4 and P = 0.8, 0.3, 0.6: mu_a = (0 + 8/3 * 1 + 4/3 * 1/4) / 3 = (8/3 + 1/3) / 3 = 1, but
    # 0.8 / 0.3 + (0.8 / 0.6) * 0.25 is 3.0000000000000004 in floating point
    rewards = {"a": (0.0,) * 4, "b": (1.0,) * 4, "c": (1.0, 0.0, 0.0, 0.0)}
    ratio = ratio_of(a=0.8, b=0.3, c=0.6)
    assert capability_aware_baseline(rewards, "a", ratio, "keep") > 1
    assert capability_aware_baseline(rewards, "a", ratio) == 1.0
    # a correct response is then worth exactly as much as expected: (1 - 1) / sigma = 0
    assert hacpo(rewards, "a", ratio, cross_baseline="learner")["b"] == (0.0,) * 4
    # with a millionth more capability it is above: mu_a = 1.000001, and the own mean 0 replaces it
    above = ratio_of(a=0.8000008, b=0.3, c=0.6)
    assert capability_aware_baseline(rewards, "a", above) == 0.0
    # ten times the rewards and the highest reward
    tenfold = {agent: tuple(10 * reward for reward in values) for agent, values in rewards.items()}
    assert capability_aware_baseline(tenfold, "a", ratio, "own_mean", 10.0) == 10.0
    assert capability_aware_baseline(tenfold, "a", ratio, "own_mean", 9.99) == 0.0


def test_overshoot_of_a_cross_baseline_falls_back_to_the_sources_mean() -> None:
    # learner b, source a: mu_a = 1.125 -> a's own mean 0.75; times omega(a, b) = 2
    sigma = math.sqrt(0.1875)
    advantages = hacpo(OVERSHOOT, "b", ratio_of(a=0.6, b=0.3))
    assert advantages["a"] == pytest.approx((0.5 / sigma,) * 3 + (-1.5 / sigma,))
    # with b's own baseline for a's responses: 1 - 0.5625 = 0.4375; times 2
    advantages = hacpo(OVERSHOOT, "b", ratio_of(a=0.6, b=0.3), cross_baseline="learner")
    assert advantages["a"] == pytest.approx((0.875 / sigma,) * 3 + (-1.125 / sigma,))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("settings", [HacpoSettings(), NaiveSettings(), GspoSettings(), GrpoSettings()])
def test_uniform_rewards_give_advantage_zero(settings, reward: float) -> None:
    rewards = {"a": (reward,) * 3, "b": (reward,) * 2}
    advantages = make_method(settings).advantages(rewards, "a", ratio_of(a=0.9, b=0.2))
    expected = {"a": (0.0,) * 3, "b": (0.0,) * 2}
    assert advantages == (expected if settings.name in ("hacpo", "naive") else {"a": (0.0,) * 3})


@pytest.mark.parametrize("settings", [HacpoSettings(), NaiveSettings(), GspoSettings()])
@pytest.mark.parametrize("normaliser", [EXACT_STD, Normaliser()])
def test_a_single_response_gives_advantage_zero(settings, normaliser) -> None:
    method = make_method(settings, normaliser=normaliser)
    assert method.advantages({"a": (1.0,)}, "a", equal_capability) == {"a": (0.0,)}


def test_a_group_that_is_uniform_alone_learns_from_the_joint_comparison() -> None:
    rewards = {"a": (0.0, 0.0), "b": (1.0, 1.0)}
    # alone: nothing. Together (omega 1): mu = 1/2, sigma = 1/2: -1 and +1
    assert make_method(GspoSettings()).advantages(rewards, "a", equal_capability) == {"a": (0.0, 0.0)}
    assert hacpo(rewards, "a", equal_capability) == {"a": (-1.0, -1.0), "b": (1.0, 1.0)}


def test_an_agent_that_never_succeeds() -> None:
    tracker = CapabilityTracker(["never", "half"])
    for _ in range(3):
        tracker.record({"never": [0.0, 0.0, 0.0, 0.0], "half": [1.0, 0.0, 0.0, 1.0]})
    rewards = {"never": (0.0, 0.0), "half": (1.0, 0.0)}
    std = Normaliser(epsilon=0.0)
    # P = 1e-8 and 0.5: omega clamped to 0.1 and 10. mu_never = (0 + 0.1 * 0.5) / 2 = 0.025,
    # mu_half = (10 * 0 + 0.5) / 2 = 0.25. Pooled 0 0 1 0: mean 1/4, squares 3/4, / 3 -> sigma = 1/2
    # A_never = -0.025 / 0.5 = -0.05; A_half = 0.75 / 0.5 = 1.5 and -0.25 / 0.5 = -0.5
    weak = hacpo(rewards, "never", tracker.ratio, normaliser=std)
    assert weak["never"] == pytest.approx((-0.05, -0.05))
    assert weak["half"] == pytest.approx((15.0, -5.0))  # omega(half, never) = 10
    strong = hacpo(rewards, "half", tracker.ratio, normaliser=std)
    assert strong["half"] == pytest.approx((1.5, -0.5))
    assert strong["never"] == pytest.approx((-0.005, -0.005))  # omega(never, half) = 0.1


@pytest.mark.parametrize("settings", [GrpoSettings(), GspoSettings()])
def test_methods_without_sharing_see_their_own_group_only(settings) -> None:
    method = make_method(settings, normaliser=EXACT_STD)
    # own mean 3/4, own std sqrt(3)/4, whatever b earned and whatever omega is
    advantages = method.advantages(TWO, "a", ratio_of(a=0.6, b=0.3))
    high, low = 0.25 / (math.sqrt(3) / 4), -0.75 / (math.sqrt(3) / 4)
    assert advantages.keys() == {"a"}
    assert advantages["a"] == pytest.approx((high, low, high, high))


def test_naive_compares_all_agents_with_the_joint_mean() -> None:
    method = make_method(NaiveSettings(), normaliser=EXACT_STD)
    # mean 1/2, std 1/2, omega ignored: +1 or -1
    for learner in TWO:
        advantages = method.advantages(TWO, learner, ratio_of(a=0.6, b=0.3))
        assert advantages == {"a": (1.0, -1.0, 1.0, 1.0), "b": (-1.0, 1.0, -1.0, -1.0)}


def test_naive_keeps_its_mean_whatever_the_scale_of_rewards() -> None:
    # rewards up to 4: mean (3 + 1) / 2 = 2 for both learners, std of 4 2 2 0 = sqrt(8 / 4)
    rewards = {"a": (4.0, 2.0), "b": (2.0, 0.0)}
    unit = 2 / math.sqrt(2)
    for learner in rewards:
        advantages = make_method(NaiveSettings(), normaliser=EXACT_STD).advantages(
            rewards, learner, equal_capability
        )
        assert advantages["a"] == pytest.approx((unit, 0.0))
        assert advantages["b"] == pytest.approx((0.0, -unit))
