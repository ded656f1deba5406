"""Published rules for sharing besides Naive and HACPO: advantages, losses, gradients, by hand."""

from __future__ import annotations

import math

import pytest

from hacrl.algorithms.advantage import Normaliser, equal_capability
from hacrl.algorithms.context import StepContext
from hacrl.algorithms.methods import make_method
from hacrl.algorithms.rules.s2l_po import explorer_responses
from hacrl.config.schema import (
    FtisSettings,
    GspoSettings,
    S2lpoSettings,
    SapoSettings,
    SuccessGatedSettings,
    XgrpoSettings,
)

from .batches import Row, loss_and_gradient, make_batch, row_with_ratio

EXACT = Normaliser(unbiased=False, epsilon=0.0)
WIDE = {"clip_low": 0.2, "clip_high": 0.28}
# a: mean 1/4, biased deviation sqrt(3)/4; b: mean 3/4, the same deviation; together mean 1/2, deviation 1/2
MIXED = {"a": (1.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0, 1.0)}
HIGH, LOW = math.sqrt(3.0), math.sqrt(1 / 3)  # (1 - 1/4) / (sqrt(3)/4) and (1/4) / (sqrt(3)/4)


def advantages(settings, rewards, learner: str, context: StepContext | None = None, max_reward=1.0):
    method = make_method(settings, max_reward, EXACT)
    found = method.at(context or StepContext()).advantages(rewards, learner, equal_capability)
    return {source: list(values) for source, values in found.items()}


def loss_of(settings, rows):
    batch = make_batch(rows)
    terms = make_method(settings).loss(batch)
    return *loss_and_gradient(batch, terms), terms


# -- success-gated transfer


def test_successes_are_transferred_only_where_all_own_responses_fail() -> None:
    settings = SuccessGatedSettings(transfer_weight=0.5)
    failed = {"a": (0.0, 0.0), "b": (1.0, 0.0, 1.0), "c": (0.0, 1.0)}
    assert advantages(settings, failed, "a") == {
        "a": [0.0, 0.0],
        "b": [0.5, None, 0.5],
        "c": [None, 0.5],
    }
    # one own success is enough: b's and c's responses are left out, own advantages are GSPO's
    assert advantages(settings, {**failed, "a": (1.0, 0.0)}, "a") == {"a": [1.0, -1.0]}
    # b has successes of its own: nothing is transferred to it
    own = advantages(settings, failed, "b")
    assert list(own) == ["b"]
    assert own["b"] == pytest.approx(
        [math.sqrt(0.5), -math.sqrt(2), math.sqrt(0.5)]
    )  # mean 2/3, std sqrt(2)/3


def test_partial_credit_is_no_success_where_the_highest_reward_is_known() -> None:
    rewards = {"a": (0.5, 0.5), "b": (0.5, 2.0)}
    assert advantages(SuccessGatedSettings(), rewards, "a", max_reward=2.0)["b"] == [None, 1.0]
    # unknown: any reward above the lowest counts, also the learner's own
    assert list(advantages(SuccessGatedSettings(), rewards, "a", max_reward=None)) == ["a"]
    given = SuccessGatedSettings(reward_range=(0.5, None))
    assert advantages(given, rewards, "a", max_reward=None)["b"] == [None, 1.0]


def test_a_transferred_success_is_learnt_by_its_log_likelihood() -> None:
    # 2 tokens, 5 of the source: loss -0.5 * (-0.4 - 0.8) / 2 = 0.3, gradient -0.5 / 2 a token, whatever s is
    transferred = Row([-0.4, -0.8], -30.0, 0.5, own=False, source_length=5)
    own = row_with_ratio(1.1, 2.0, own=True)
    losses, gradients, terms = loss_of(SuccessGatedSettings(**WIDE), [transferred, own])
    assert losses == pytest.approx([0.3, -2.2])
    assert gradients[0] == pytest.approx([-0.25, -0.25])
    assert gradients[1] == pytest.approx([-1.1, -1.1])  # s A / |y|
    assert terms.ratio_B[0].item() == pytest.approx(math.exp((-1.2 + 30.0) / 5))
    assert terms.clipped_below_B.tolist() == terms.clipped_above_B.tolist() == [0.0, 0.0]


def test_an_impossible_success_is_left_out() -> None:
    losses, gradients, terms = loss_of(SuccessGatedSettings(), [Row([-0.5, -math.inf], -1.0, 1.0)])
    assert (losses, gradients) == ([0.0], [[0.0, 0.0]])
    assert terms.clipped_below_B.tolist() == [1.0]


# -- XGRPO


def test_own_responses_are_compared_with_the_rewards_of_all() -> None:
    # mean 1/2, deviation 1/2: +1 and -1; a's responses alone
    assert advantages(XgrpoSettings(), MIXED, "a") == {"a": [1.0, -1.0, -1.0, -1.0]}
    # own rewards are all 0, a partner's are all 1: mean 1/2, deviation 1/2
    assert advantages(XgrpoSettings(), {"a": (0.0, 0.0), "b": (1.0, 1.0)}, "a") == {"a": [-1.0, -1.0]}
    method = make_method(XgrpoSettings())
    assert method.baseline is not None
    assert method.baseline(MIXED, "a", equal_capability) == 0.5
    assert not method.settings.shares_rollouts  # as many updates as GSPO, and nothing to retokenise
    rows = [row_with_ratio(s, a, own=True) for s in (0.7, 1.1) for a in (2.0, -2.0)]
    assert loss_of(XgrpoSettings(**WIDE), rows)[:2] == loss_of(GspoSettings(**WIDE), rows)[:2]


def test_a_scaled_baseline_favours_right_responses() -> None:
    # mean 1/4, halved: 7/8 and -1/8 over sqrt(3)/4
    found = advantages(GspoSettings(baseline_scale=0.5), MIXED, "a")["a"]
    assert found == pytest.approx([3.5 / math.sqrt(3), *[-0.5 / math.sqrt(3)] * 3])
    assert advantages(GspoSettings(baseline_scale=0.5), {"a": (1.0, 1.0)}, "a") == {"a": [0.0, 0.0]}
    method = make_method(GspoSettings(baseline_scale=0.5))
    assert method.baseline is not None
    assert method.baseline(MIXED, "a", equal_capability) == 0.125
    with pytest.raises(ValueError, match=r"baseline_scale must be in \[0, 1\], not 1.5"):
        GspoSettings(baseline_scale=1.5)


# -- F-TIS


@pytest.mark.parametrize("settings", [FtisSettings(), SapoSettings()], ids=lambda s: s.name)
def test_advantages_are_within_each_source(settings) -> None:
    found = advantages(settings, {**MIXED, "c": (1.0, 1.0)}, "a")
    assert found["a"] == pytest.approx([HIGH, -LOW, -LOW, -LOW])
    assert found["b"] == pytest.approx([LOW, LOW, -HIGH, LOW])
    assert found["c"] == [0.0, 0.0]  # equal rewards teach nothing


def test_token_weights_are_truncated_and_carry_no_gradient() -> None:
    # pi_k / pi_j per token: e^0.5 = 1.6487, and e^1.2 = 3.32, truncated to 2. Loss -A (1.6487 + 2) / 2
    row = Row([-1.0, -0.8], [-1.5, -2.0], advantage=1.5)
    losses, gradients, _ = loss_of(FtisSettings(), [row])
    weights = [math.exp(0.5), 2.0]
    assert losses == pytest.approx([-1.5 * sum(weights) / 2])
    assert gradients[0] == pytest.approx([-1.5 * weight / 2 for weight in weights])
    # another cap
    losses, gradients, _ = loss_of(FtisSettings(weight_cap=1.0), [row])
    assert losses == pytest.approx([-1.5])
    assert gradients[0] == pytest.approx([-0.75, -0.75])


def test_distant_responses_with_a_negative_advantage_are_filtered() -> None:
    # log pi_j(y) - log pi_k(y) = 4.0: filtered from g = 4 on
    far = Row([-3.0, -3.0], [-1.0, -1.0], advantage=-1.0)
    weight = math.exp(-2.0)
    for limit, filtered in [(4.001, False), (4.0, True), (3.0, True)]:
        losses, gradients, terms = loss_of(FtisSettings(filter_kl=limit), [far])
        assert losses == pytest.approx([0.0 if filtered else weight])
        assert gradients[0] == pytest.approx([0.0 if filtered else weight / 2] * 2)
        assert terms.clipped_below_B.tolist() == [float(filtered)]
    # a positive advantage is never filtered
    losses, gradients, _ = loss_of(FtisSettings(filter_kl=3.0), [Row([-3.0, -3.0], [-1.0, -1.0], 1.0)])
    assert losses == pytest.approx([-weight])
    # an impossible response: no gradient, nothing that is not finite
    losses, gradients, _ = loss_of(FtisSettings(), [Row([-1.0, -math.inf], [-1.0, -1.0], -1.0)])
    assert (losses, gradients) == ([0.0], [[0.0, 0.0]])


def test_a_response_in_other_tokens_has_one_weight_for_all_of_them() -> None:
    # only the sum is known: s = exp((-1.8 + 2.4) / 3) = e^0.2, over 3 source tokens
    row = Row([-1.0, -0.8], -2.4, advantage=1.0, source_length=3)
    losses, gradients, _ = loss_of(FtisSettings(), [row])
    assert losses == pytest.approx([-math.exp(0.2)])
    assert gradients[0] == pytest.approx([-math.exp(0.2) / 2] * 2)


@pytest.mark.parametrize(
    "settings", [FtisSettings(**WIDE), SuccessGatedSettings(**WIDE)], ids=lambda s: s.name
)
def test_own_responses_have_gspos_loss(settings) -> None:
    rows = [row_with_ratio(s, a, own=True, tokens=3) for a in (2.0, -1.5) for s in (0.7, 1.1, 1.5)]
    assert loss_of(settings, rows)[:2] == loss_of(GspoSettings(**WIDE), rows)[:2]


# -- SAPO: its loss is GSPO's; tests/training/test_rescoring.py checks the old policy that it is given


def test_pooled_responses_have_gspos_loss() -> None:
    cross = [row_with_ratio(s, a, own=False) for s in (0.7, 1.1, 1.5) for a in (2.0, -1.5)]
    own = [row_with_ratio(s, a, own=True) for s in (0.7, 1.1, 1.5) for a in (2.0, -1.5)]
    assert loss_of(SapoSettings(**WIDE), cross)[:2] == loss_of(GspoSettings(**WIDE), own)[:2]


# -- S2L-PO


def test_the_explorers_share_falls_linearly() -> None:
    assert [explorer_responses(8, progress, 0.5) for progress in (0.0, 0.1, 0.25, 0.4, 0.5, 0.9)] == [
        8,
        6,  # 8 * (1 - 0.2) = 6.4
        4,
        2,  # 8 * 0.2 = 1.6
        0,
        0,
    ]


def test_a_group_is_made_of_both_agents_responses() -> None:
    settings = S2lpoSettings(explorer="b", anneal=1.0)
    # G_S = 4 * (1 - 0.5) = 2: b's first two (1, 1), a's last two (0, 0): mean 1/2, deviation 1/2
    half = StepContext(progress=0.5)
    assert advantages(settings, MIXED, "a", half) == {
        "b": [1.0, 1.0, None, None],
        "a": [None, None, -1.0, -1.0],
    }
    method = make_method(settings).at(half)
    assert method.baseline is not None
    assert method.baseline(MIXED, "a", equal_capability) == 0.5
    # at first the explorer alone, at last the learner alone
    start, end = (advantages(settings, MIXED, "a", StepContext(progress=p)) for p in (0.0, 1.0))
    assert start["a"] == [None] * 4
    assert start["b"] == pytest.approx([LOW, LOW, -HIGH, LOW])
    assert end["b"] == [None] * 4
    assert end["a"] == pytest.approx([HIGH, -LOW, -LOW, -LOW])


def test_the_explorer_does_not_learn_and_other_agents_do_not_teach() -> None:
    settings = S2lpoSettings(explorer="b")
    rewards = {**MIXED, "c": (1.0, 0.0)}
    assert advantages(settings, rewards, "b") == {}
    assert set(advantages(settings, rewards, "a", StepContext(progress=0.3))) == {"a", "b"}
    # without the explorer, which may be paused, the learner is alone
    alone = {"a": MIXED["a"], "c": (1.0, 0.0)}
    assert advantages(settings, alone, "a", StepContext(progress=0.0)) == {
        "a": pytest.approx([HIGH, -LOW, -LOW, -LOW])
    }


def test_an_explorer_with_fewer_responses_gives_what_it_has() -> None:
    rewards = {"a": (1.0, 0.0, 0.0, 1.0), "b": (1.0,)}
    found = advantages(S2lpoSettings(explorer="b"), rewards, "a", StepContext(progress=0.0))
    # b's one response and a's last three: 1 | 0 0 1, mean 1/2, deviation 1/2
    assert found == {"b": [1.0], "a": [None, -1.0, -1.0, 1.0]}


# -- settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuccessGatedSettings(transfer_weight=0.0), "transfer_weight must be positive, not 0.0"),
        (lambda: FtisSettings(weight_cap=0.0), "weight_cap must be positive, not 0.0"),
        (lambda: FtisSettings(filter_kl=-1.0), "filter_kl must not be negative, not -1.0"),
        (lambda: S2lpoSettings(anneal=0.0), r"anneal must be in \(0, 1\], not 0.0"),
    ],
)
def test_values_without_a_meaning_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_as_many_updates_as_gspo_unless_all_responses_are_trained_on() -> None:
    settings = (SuccessGatedSettings(), XgrpoSettings(), S2lpoSettings(), FtisSettings(), SapoSettings())
    assert [one.sources(4) for one in settings] == [1, 1, 1, 4, 4]
