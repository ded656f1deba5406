"""Trust by gradient alignment: baseline, advantages, loss and trust, worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from hacrl.algorithms.advantage import (
    Normaliser,
    capability_aware_baseline,
    equal_capability,
    ratio_of_sums_baseline,
)
from hacrl.algorithms.alignment import Alignment, TrustTracker
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AlignedSettings, GspoSettings

from .batches import Row, loss_and_gradient, make_batch, row_with_ratio

EXACT = Normaliser(unbiased=False, epsilon=0.0)
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
REWARDS = {"a": (1.0, 0.0, 1.0, 1.0), "b": (0.0, 1.0, 0.0, 0.0), "c": (0.0, 0.0, 0.0, 0.0)}


def test_ratio_of_sums() -> None:
    # means 3/4, 1/4, 0. mu_a = 0.6 * (3/4 + 1/4 + 0) / (0.6 + 0.3 + 0.1) = 0.6, mu_b = 0.3
    capabilities = {"a": 0.6, "b": 0.3, "c": 0.1}
    assert ratio_of_sums_baseline(REWARDS, "a", capabilities) == pytest.approx(0.6)
    assert ratio_of_sums_baseline(REWARDS, "b", capabilities) == pytest.approx(0.3)
    # a partner at 0 changes nothing: 0.6 * 1 / 0.9 = 2/3 with and without it
    dead = {"a": 0.6, "b": 0.3, "c": 0.0}
    assert ratio_of_sums_baseline(REWARDS, "a", dead) == pytest.approx(2 / 3)
    assert ratio_of_sums_baseline({k: REWARDS[k] for k in "ab"}, "a", dead) == pytest.approx(2 / 3)
    # an agent at 0 expects 0, whatever others earn
    assert ratio_of_sums_baseline(REWARDS, "c", dead) == 0.0
    # nobody succeeds: the own mean
    nobody = {"a": 0.0, "b": 0.0}
    assert ratio_of_sums_baseline({"a": (1.0, 0.0), "b": (0.0,)}, "a", nobody) == 0.5
    # rewards from -1 on: -1 + 0.6 * (1.75 + 1.25) / 0.9 = 1
    assert ratio_of_sums_baseline({k: REWARDS[k] for k in "ab"}, "a", dead, -1.0) == pytest.approx(1.0)


def test_an_agent_at_the_floor_of_capabilities_expects_nothing_exactly() -> None:
    # as the tracker has them: a mean of floored steps
    tracker = CapabilityTracker(["a", "b"])
    for _ in range(3):
        tracker.record({"a": [0.0, 0.0], "b": [1.0, 0.0]})
    context = StepContext(capabilities=tracker.current.values, trusted=frozenset({"b"}))
    method = make_method(AlignedSettings(), normaliser=EXACT).at(context)
    found = method.advantages({"a": (0.0, 0.0), "b": (1.0, 1.0)}, "a", equal_capability)
    # no gradient of its own, not even one of 1e-8 that a cosine would take at its word; mu = 0, sigma = 1/2
    assert found == {"a": (0.0, 0.0), "b": (2.0, 2.0)}


def test_with_equal_capabilities_it_is_the_papers_baseline() -> None:
    equal = dict.fromkeys(REWARDS, 0.37)
    for agent in REWARDS:
        expected = capability_aware_baseline(REWARDS, agent, equal_capability, "keep")
        assert ratio_of_sums_baseline(REWARDS, agent, equal) == pytest.approx(expected)


def test_one_agents_baseline_is_its_mean_to_the_bit() -> None:
    assert ratio_of_sums_baseline({"a": (1.0, 0.0, 0.0)}, "a", {"a": 0.1}) == 1.0 / 3.0


def advantages(learner: str, trusted: str, capabilities: dict[str, float]):
    context = StepContext(capabilities=capabilities, trusted=frozenset(trusted))
    method = make_method(AlignedSettings(), normaliser=EXACT).at(context)
    assert method.baseline is not None
    found = method.advantages(REWARDS, learner, equal_capability)
    return dict(found), method.baseline(REWARDS, learner, equal_capability)


def test_only_trusted_partners_touch_an_agents_own_advantages() -> None:
    capabilities = {"a": 0.6, "b": 0.3, "c": 0.0}
    alone, mu = advantages("a", "", capabilities)
    gspo = make_method(GspoSettings(), normaliser=EXACT).advantages(REWARDS, "a", equal_capability)
    assert alone["a"] == gspo["a"]  # to the bit
    assert mu == 0.75
    # b as if it were trusted: mu = 0.6 * 1 / 0.9 = 2/3; rewards 1 0 1 1 0 1 0 0 have deviation 1/2
    assert alone["b"] == pytest.approx((-4 / 3, 2 / 3, -4 / 3, -4 / 3))
    # c as if it were: mu = 3/4 * 0.6 / 0.6; 3 of 8 successes: deviation sqrt(15) / 8
    assert alone["c"] == pytest.approx([-0.75 / (math.sqrt(15) / 8)] * 4)
    together, mu = advantages("a", "b", capabilities)
    assert mu == pytest.approx(2 / 3)
    assert together["a"] == pytest.approx((2 / 3, -4 / 3, 2 / 3, 2 / 3))
    assert together["b"] == alone["b"]
    # c beside a and b: mu = 0.6 * 1 / 0.9 = 2/3; 4 of 12 successes: deviation sqrt(2) / 3
    assert together["c"] == pytest.approx([-(2 / 3) / (math.sqrt(2) / 3)] * 4)


def test_its_baseline_scales_like_gspos() -> None:
    method = make_method(AlignedSettings(baseline_scale=0.5), normaliser=EXACT)
    method = method.at(StepContext(capabilities=dict.fromkeys(REWARDS, 0.5)))
    gspo = make_method(GspoSettings(baseline_scale=0.5), normaliser=EXACT)
    own = method.advantages(REWARDS, "a", equal_capability)["a"]
    assert own == gspo.advantages(REWARDS, "a", equal_capability)["a"]
    # mean 3/4, halved; deviation sqrt(3)/4
    assert own[0] == pytest.approx(0.625 / (math.sqrt(3) / 4))


def loss_of(settings: AlignedSettings | GspoSettings, rows: list[Row]):
    batch = make_batch(rows)
    terms = make_method(settings).loss(batch)
    return *loss_and_gradient(batch, terms), terms.clipped_below_B.tolist(), terms.clipped_above_B.tolist()


def test_right_answers_teach_however_far_and_wrong_ones_only_if_near() -> None:
    # [0.8, 1.28], |y| = 4. Objective min(s, 1.28) * A, gradient the same over |y|; nothing for A < 0, s < 0.8
    ratios = (0.01, 0.79, 0.81, 1.2, 3.0)
    rows = [row_with_ratio(s, a, own=False, source_length=4) for a in (2.0, -1.0) for s in ratios]
    losses, gradients, below, above = loss_of(AlignedSettings(**WIDE), rows)
    right = [2.0 * weight for weight in (0.01, 0.79, 0.81, 1.2, 1.28)]
    wrong = [-weight for weight in (0.0, 0.0, 0.81, 1.2, 1.28)]
    assert losses == pytest.approx([-value for value in right + wrong])
    assert [row[0] for row in gradients] == pytest.approx([-value / 4 for value in right + wrong])
    assert below == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0]
    assert above == [0.0] * 10


def test_own_responses_have_gspos_loss() -> None:
    rows = [row_with_ratio(s, a, own=True, tokens=3) for a in (2.0, -1.5) for s in (0.7, 1.1, 1.5)]
    assert loss_of(AlignedSettings(**WIDE), rows) == loss_of(GspoSettings(**WIDE), rows)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_impossible_response_has_no_gradient(advantage: float) -> None:
    row = Row([-0.5, -math.inf], -1.0, advantage)
    losses, gradients, *_ = loss_of(AlignedSettings(), [row])
    assert losses == pytest.approx([0.0], abs=1e-8)  # s is bounded at e^-20
    assert gradients[0] == pytest.approx([0.0, 0.0], abs=1e-8)


def measured(cosine: float) -> Alignment:
    return Alignment(dot=cosine * 6.0, own_norm=2.0, source_norm=3.0)


def test_trust_needs_a_mean_cosine_above_its_standard_error() -> None:
    tracker = TrustTracker(window=3)
    tracker.record("b", measured(0.9))
    assert not tracker.trusts("b")  # one measurement says nothing about its error
    tracker.record("b", measured(0.1))
    # mean 0.5, deviation 0.4 * sqrt(2), standard error 0.4
    assert tracker.trusted == {"b"}
    tracker.record("b", measured(-0.4))
    # mean 0.2; squared deviations 0.49 + 0.01 + 0.36 = 0.86, standard error sqrt(0.86 / 2 / 3) = 0.379
    assert not tracker.trusts("b")
    assert tracker.mean("b") == pytest.approx(0.2)
    tracker.record("b", measured(0.1))
    # the first has left: 0.1 -0.4 0.1, mean -0.067
    assert tracker.mean("b") == pytest.approx(-0.2 / 3)
    assert not tracker.trusts("b")
    assert tracker.mean("c") is None
    assert not tracker.trusts("c")


def test_gradients_at_right_angles_and_opposed_ones_are_not_trusted() -> None:
    tracker = TrustTracker()
    for _ in range(5):
        tracker.record("opposed", measured(-0.3))
        tracker.record("nothing", Alignment(0.0, 2.0, 0.0))  # a partner without a gradient
        tracker.record("aligned", measured(0.01))
    assert tracker.trusted == {"aligned"}


def test_an_agent_without_a_gradient_follows_a_stronger_partner() -> None:
    tracker = TrustTracker()
    for _ in range(2):
        tracker.record("strong", Alignment(0.0, 0.0, 1.0), is_stronger=True)
        tracker.record("weak", Alignment(0.0, 0.0, 1.0), is_stronger=False)
        tracker.record("silent", Alignment(0.0, 0.0, 0.0), is_stronger=True)
    assert tracker.trusted == {"strong"}


def test_a_gradient_that_is_not_finite_is_no_measurement() -> None:
    tracker = TrustTracker()
    tracker.record("b", Alignment(math.nan, 1.0, math.inf))
    assert tracker.state_dict() == {}


def test_trust_survives_a_resume() -> None:
    tracker = TrustTracker(window=2)
    for cosine in (0.3, 0.2, 0.1):
        tracker.record("b", measured(cosine))
    state = json.loads(json.dumps(tracker.state_dict()))
    assert state == {"b": [pytest.approx(0.2), pytest.approx(0.1)]}
    resumed = TrustTracker(window=2)
    resumed.load_state_dict(state)
    for one in (tracker, resumed):
        one.record("b", measured(-0.5))
    assert resumed.state_dict() == tracker.state_dict()
    assert resumed.trusted == tracker.trusted == frozenset()


def test_a_window_of_one_step_is_refused() -> None:
    with pytest.raises(ValueError, match="trust_window must be at least 2 steps, not 1"):
        AlignedSettings(trust_window=1)
