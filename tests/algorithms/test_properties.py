"""What must hold for any numbers, searched by hypothesis."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hacrl.algorithms.advantage import Normaliser, equal_capability
from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.importance import sequence_ratio
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, HacpoSettings, NaiveSettings

from .batches import Row, gradient, loss_and_gradient, make_batch

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)

reward = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 1.0, width=32))
group = st.lists(reward, min_size=1, max_size=6)
capability = st.floats(0.05, 1.0)
advantage = st.floats(-3.0, 3.0)


@st.composite
def prompts(draw, min_agents: int = 1):
    """Rewards of one to four agents on one prompt, and their capabilities."""
    agents = "abcd"[: draw(st.integers(min_agents, 4))]
    return {agent: draw(group) for agent in agents}, {agent: draw(capability) for agent in agents}


def ratio_of(capabilities: dict[str, float]):
    return lambda k, j: capabilities[k] / capabilities[j]


@st.composite
def rows(draw, own=None, log_ratio=st.floats(-0.5, 0.5)):  # noqa: B008 - a strategy is immutable
    """A response of one to three tokens whose log s (over the source length) is about as given."""
    tokens = draw(st.integers(1, 3))
    is_own = draw(st.booleans()) if own is None else own
    length = tokens if is_own else draw(st.integers(1, 5))
    logprobs = [draw(st.floats(-3.0, -0.01)) for _ in range(tokens)]
    behaviour = math.fsum(logprobs) - length * draw(log_ratio)
    return Row(logprobs, behaviour, draw(advantage), is_own, length)


hacpo_options = st.fixed_dictionaries(
    {
        "alpha": st.floats(0.0, 6.0),
        "delta": st.floats(0.01, 0.9),
        "delta_step": st.floats(0.0, 0.05),
        "cross_upper": st.floats(1.0, 1.2),
        "cross_clip": st.booleans(),
        "discrepancy": st.booleans(),
        "capability_baseline": st.booleans(),
        "cross_baseline": st.sampled_from(["source", "learner"]),
        "baseline_overshoot": st.sampled_from(["own_mean", "keep"]),
    }
)


@few
@given(
    group, hacpo_options, st.lists(rows(own=True), min_size=1, max_size=5), st.integers(0, 7), st.booleans()
)
def test_one_agent_is_exactly_gspo(values, options, own_rows, updates_done, single) -> None:
    common = {"clip_low": 0.05, "clip_high": 0.08}
    hacpo, gspo = make_method(HacpoSettings(**common, **options)), make_method(GspoSettings(**common))
    tracker = CapabilityTracker(["a"])
    tracker.record({"a": values})
    assert hacpo.advantages({"a": values}, "a", tracker.ratio) == gspo.advantages(
        {"a": values}, "a", tracker.ratio
    )
    dtype = torch.float32 if single else torch.float64
    batch = make_batch(own_rows, updates_done=updates_done, dtype=dtype)
    hacpo_terms, gspo_terms = hacpo.loss(batch), gspo.loss(batch)
    assert loss_and_gradient(batch, hacpo_terms) == loss_and_gradient(batch, gspo_terms)
    assert hacpo_terms.clipped_below_B.tolist() == gspo_terms.clipped_below_B.tolist()
    assert hacpo_terms.clipped_above_B.tolist() == gspo_terms.clipped_above_B.tolist()
    assert hacpo_terms.ratio_B.tolist() == gspo_terms.ratio_B.tolist()


@few
@given(st.lists(rows(own=True), min_size=1, max_size=5))
def test_one_agent_over_its_own_length_is_gspo_up_to_rounding(own_rows) -> None:
    # a mean of differences against a difference of means: equal in exact arithmetic. The clip range is
    # kept out of reach, so that rounding cannot decide on which side of it a ratio lies.
    common = {"clip_low": 0.99, "clip_high": 9.0}
    batch = make_batch(own_rows)
    losses, gradients = zip(
        *(
            loss_and_gradient(batch, make_method(method).loss(batch))
            for method in (HacpoSettings(**common, ratio_length="own"), GspoSettings(**common))
        ),
        strict=True,
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    for got, expected in zip(*gradients, strict=True):
        assert got == pytest.approx(expected, rel=1e-12)


@few
@given(prompts(min_agents=2), hacpo_options, st.randoms(use_true_random=False))
def test_order_of_agents_does_not_matter(prompt, options, rng) -> None:
    rewards, capabilities = prompt
    order = list(rewards)
    rng.shuffle(order)
    shuffled = {agent: rewards[agent] for agent in order}
    for method in (make_method(HacpoSettings(**options)), make_method(NaiveSettings())):
        for learner in rewards:
            straight = method.advantages(rewards, learner, ratio_of(capabilities))
            assert method.advantages(shuffled, learner, ratio_of(capabilities)) == straight


@few
@given(prompts(min_agents=2), hacpo_options, st.randoms(use_true_random=False))
def test_order_of_responses_does_not_matter(prompt, options, rng) -> None:
    rewards, capabilities = prompt
    order = {agent: rng.sample(range(len(values)), len(values)) for agent, values in rewards.items()}
    shuffled = {agent: [rewards[agent][i] for i in order[agent]] for agent in rewards}
    method = make_method(HacpoSettings(**options))
    straight = method.advantages(rewards, "a", ratio_of(capabilities))
    permuted = method.advantages(shuffled, "a", ratio_of(capabilities))
    assert permuted == {agent: tuple(straight[agent][i] for i in order[agent]) for agent in rewards}


@few
@given(hacpo_options, st.lists(rows(), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_a_responses_loss_does_not_depend_on_the_rest_of_the_batch(options, all_rows, rng) -> None:
    order = rng.sample(range(len(all_rows)), len(all_rows))
    method = make_method(HacpoSettings(**options, clip_low=0.05, clip_high=0.08))
    straight = make_batch(all_rows, updates_done=1)
    permuted = replace(
        straight,
        **{
            name: getattr(straight, name)[order].detach().requires_grad_(name == "logprobs_BT")
            for name in (
                "logprobs_BT",
                "mask_BT",
                "behaviour_logprobs_BT",
                "behaviour_logprob_B",
                "source_length_B",
                "advantages_B",
                "is_own_B",
            )
        },
    )
    loss, grad = loss_and_gradient(straight, method.loss(straight))
    loss_permuted, grad_permuted = loss_and_gradient(permuted, method.loss(permuted))
    assert loss_permuted == pytest.approx([loss[i] for i in order], rel=1e-14)
    for row, i in zip(grad_permuted, order, strict=True):
        assert row == pytest.approx(grad[i], rel=1e-14)


@few
@given(st.lists(group, min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_identical_agents_have_ratio_one(steps, rng) -> None:
    tracker = CapabilityTracker(["a", "b"])
    for values in steps:
        tracker.record({"a": values, "b": rng.sample(values, len(values))})
        assert tracker.ratio("a", "b") == tracker.ratio("b", "a") == 1.0


@few
@given(hacpo_options, st.lists(rows(own=False), min_size=1, max_size=6), st.integers(0, 3))
def test_a_clipped_cross_response_has_exactly_no_gradient(options, cross_rows, updates_done) -> None:
    options = options | {"cross_clip": True}
    batch = make_batch(cross_rows, updates_done=updates_done)
    terms = make_method(HacpoSettings(**options)).loss(batch)
    low = 1.0 - options["delta"] + updates_done * options["delta_step"]
    for row, s, below, above in zip(
        gradient(batch, terms.loss_B),
        terms.ratio_B.tolist(),
        terms.clipped_below_B.tolist(),
        terms.clipped_above_B.tolist(),
        strict=True,
    ):
        outside = s < low or s > options["cross_upper"]
        assert (below, above) == (float(s < low), float(s > options["cross_upper"]))
        if outside:
            assert row == [0.0] * len(row)


@few
@given(hacpo_options, rows(own=False), st.integers(0, 3))
def test_the_exponential_factor_carries_no_gradient(options, row, updates_done) -> None:
    batch = make_batch([row], updates_done=updates_done)
    s = sequence_ratio(batch).item()
    low = 1.0 - options["delta"] + updates_done * options["delta_step"]
    inside = not options["cross_clip"] or low <= s <= options["cross_upper"]
    # d(-s * c A) / d log pi_t = -s / |y| * c A with c = s^alpha held constant (inside, clip(s) = s)
    expected = -(s ** options["alpha"]) * row.advantage * s / row.source_length if inside else 0.0
    got = gradient(batch, make_method(HacpoSettings(**options)).loss(batch).loss_B)[0]
    assert got == pytest.approx([expected] * len(row.logprobs), rel=1e-10)


@few
@given(rows(own=False), st.integers(0, 3))
def test_alpha_zero_and_no_step_leave_a_plain_fixed_clip(row, updates_done) -> None:
    batch = make_batch([row], updates_done=updates_done)
    s = math.exp((math.fsum(row.logprobs) - row.behaviour) / row.source_length)
    # alpha = 0: no exponent, the schedule stays
    scheduled = HacpoSettings(alpha=0.0, delta=0.3, delta_step=0.05)
    clipped = min(max(s, 0.7 + 0.05 * updates_done), 1.0)
    assert make_method(scheduled).loss(batch).loss_B.item() == pytest.approx(
        -clipped * row.advantage, rel=1e-12
    )
    # delta_step = 0: no schedule, the exponent stays
    fixed = HacpoSettings(alpha=2.0, delta=0.3, delta_step=0.0)
    clipped = min(max(s, 0.7), 1.0)
    expected = -(clipped**3) * row.advantage
    assert make_method(fixed).loss(batch).loss_B.item() == pytest.approx(expected, rel=1e-12)
    # no clipping, no exponent: the plain ratio
    plain = HacpoSettings(alpha=0.0, cross_clip=False)
    assert make_method(plain).loss(batch).loss_B.item() == pytest.approx(-s * row.advantage, rel=1e-12)


@few
@given(prompts(), st.sampled_from(["source", "learner"]), st.booleans())
def test_without_its_mechanisms_hacpo_has_naives_advantages(prompt, cross_baseline, equal) -> None:
    rewards, capabilities = prompt
    normaliser = Normaliser(epsilon=1e-3)
    off = {"capability_baseline": equal, "discrepancy": equal}  # either omega is 1, or nobody asks for it
    ratio = equal_capability if equal else ratio_of(capabilities)
    options = {"cross_baseline": cross_baseline, "baseline_overshoot": "keep"}
    hacpo = make_method(HacpoSettings(**off, **options), normaliser=normaliser)
    naive = make_method(NaiveSettings(), normaliser=normaliser)
    for learner in rewards:
        assert hacpo.advantages(rewards, learner, ratio) == naive.advantages(rewards, learner, ratio)
