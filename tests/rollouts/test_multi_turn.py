"""Two actions with an observation between them: only action tokens have a ratio, a loss and a gap.

The response is the action "11", the observation "=2" and the action "9" with a stop token::

    characters   4 4 | 18 5 | 12 1      pairs of digits   33 | 18 5 | 12 1
"""

from __future__ import annotations

import math

import pytest
import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AnyMethodSettings,
    GrpoSettings,
    HacpoSettings,
    LearningSettings,
    NaiveSettings,
)
from hacrl.models.logprobs import packed_logprobs, padded_logprobs, response_mask
from hacrl.models.retokenizing import LearnerTokens
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.learner import Learner
from hacrl.training.samples import LearnerSamples, SampleBuilder
from hacrl.types import LearnerSample, LossBatch, Rollout, Sampling, Segment
from tests.support.forward import plain_logprobs
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.texts import learner_tokens
from tests.support.tiny import char_agent, pair_agent

CHAR, TWIN, PAIR = char_agent("ada"), char_agent("twin", seed=4), pair_agent("bob")
SAMPLING = Sampling(16)
T, F = True, False


def two_actions(agent, first: str = "11", seen: str = "=2", last: str = "9") -> Rollout:
    """Action, observation, action; the action tokens have log-probabilities -.25, -.5, -.75, ..."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(agent.tokenizer(text, add_special_tokens=False).input_ids)

    actions = ids(first), (*ids(last), agent.stop_id)
    values = [-0.25 * (t + 1) for t in range(sum(map(len, actions)))]
    cut = len(actions[0])
    segments = (
        Segment("action", first, actions[0], tuple(values[:cut])),
        Segment("observation", seen, ids(seen)),
        Segment("action", last, actions[1], tuple(values[cut:])),
    )
    return Rollout(problem("1:"), agent.name, segments, "stop", 0, agent.tokenizer_fingerprint, (4, 21))


def build(learner, source, method: AnyMethodSettings, stop: bool = True, **texts: str) -> LearnerSamples:
    """The learner's samples: the source's two actions with reward 1, and an own wrong answer."""
    right, wrong = judged(two_actions(source, **texts), 1.0), judged(rollout(learner, "3"), 0.0)
    responses = (
        {source.name: (right, wrong)}
        if source is learner
        else {source.name: (right,), learner.name: (wrong,)}
    )
    group = PromptGroup(problem("1:"), responses)
    return SampleBuilder(learner, make_method(method), stop).build([group], lambda *_: 1.0)


def multi_turn(built: LearnerSamples) -> LearnerSample:
    (found,) = [one for one in built.samples if not all(one.loss_mask)]
    return found


def test_a_rollout_counts_only_action_tokens() -> None:
    one = two_actions(PAIR)
    assert one.text == "11=29"
    assert one.token_ids == (33, 18, 5, 12, 1)
    assert one.loss_mask == (T, F, F, T, T)
    assert one.token_logprobs == (-0.25, -0.5, -0.75)
    assert (one.num_tokens, one.logprob) == (3, -1.5)


@pytest.mark.parametrize(
    ("kind", "logprobs", "message"),
    [
        ("action", (-1.0,), "an action segment of 2 tokens must have 2 log-probabilities, not 1"),
        ("observation", (-1.0, -1.0), "an observation segment of 2 tokens must have 0 log-prob"),
    ],
)
def test_log_probabilities_belong_to_actions(kind, logprobs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Segment(kind, "11", (4, 4), logprobs)


def test_a_rollout_that_stopped_ends_with_an_action() -> None:
    seen = Segment("observation", "=", (18,))
    with pytest.raises(ValueError, match="must end with an action segment"):
        Rollout(problem("1:"), "ada", (seen,), "stop", 0, "")
    assert Rollout(problem("1:"), "ada", (seen,), "length", 0, "").num_tokens == 0


def test_a_loss_mask_is_as_long_as_the_response() -> None:
    assert LearnerSample((4,), (5, 6), None, -1.0, 1, "x", True, 0.0).loss_mask == (T, T)
    with pytest.raises(ValueError, match="a loss mask of 1 values for 2 response tokens"):
        LearnerSample((4,), (5, 6), None, -1.0, 1, "x", True, 0.0, (T,))


def test_learner_s_tokens_segment_by_segment() -> None:
    own = (4, 4, 18, 5, 12, 1), (T, T, F, F, T, T)
    assert learner_tokens(CHAR, two_actions(PAIR), False) == LearnerTokens((4, 21), own[0], False, own[1])
    assert learner_tokens(TWIN, two_actions(CHAR), True) == LearnerTokens((4, 21), own[0], True, own[1])
    pairs = (33, 18, 5, 12, 1), (T, F, F, T, T)
    assert learner_tokens(PAIR, two_actions(CHAR), False) == LearnerTokens((4, 21), pairs[0], False, pairs[1])
    # "1" and "2" would be one token of pairs, but they belong to different segments
    tokens = learner_tokens(PAIR, two_actions(CHAR, first="1", seen="2", last="34"), False)
    assert tokens == LearnerTokens((4, 21), (4, 5, 22 + 34, 1), False, (T, F, T, T))


@pytest.mark.parametrize("texts", [{"first": "1a"}, {"seen": "=a"}, {"last": "a"}, {"seen": "\ufffd"}])
def test_one_segment_that_cannot_be_encoded_drops_the_rollout(texts: dict[str, str]) -> None:
    built = build(CHAR, PAIR, NaiveSettings(), **texts)
    assert built.dropped == {("bob", "not_representable"): 1}
    assert all(all(one.loss_mask) for one in built.samples)


def test_too_long_counts_observations() -> None:
    # a context of 64, a prompt of 2, actions of 2 and 2 tokens: 58 observation tokens fit
    assert isinstance(learner_tokens(CHAR, two_actions(PAIR, seen="=" * 58), False), LearnerTokens)
    assert learner_tokens(CHAR, two_actions(PAIR, seen="=" * 59), False) == "too_long"


def test_samples() -> None:
    retokenised = multi_turn(build(CHAR, PAIR, NaiveSettings()))
    assert retokenised.response_ids == (4, 4, 18, 5, 12, 1)
    assert retokenised.loss_mask == (T, T, F, F, T, T)
    assert (retokenised.behaviour_logprobs, retokenised.behaviour_logprob) == (None, -1.5)
    assert (retokenised.source_length, retokenised.loss_tokens) == (3, 4)
    assert build(CHAR, PAIR, NaiveSettings()).length_ratios == {"bob": [4 / 3]}
    own = multi_turn(build(CHAR, CHAR, NaiveSettings()))
    assert own.behaviour_logprobs == (-0.25, -0.5, -0.75, -1.0)
    assert (own.behaviour_logprob, own.source_length, own.is_own) == (-2.5, 4, True)
    without_stop = multi_turn(build(CHAR, CHAR, NaiveSettings(), stop=False))
    assert without_stop.response_ids == (4, 4, 18, 5, 12)
    assert without_stop.loss_mask == (T, T, F, F, T)
    assert (without_stop.behaviour_logprobs, without_stop.source_length) == ((-0.25, -0.5, -0.75), 3)


def action_logprobs(agent, sample: LearnerSample) -> torch.Tensor:
    """An independent forward pass over the whole sequence; (actions,)."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logprobs = agent.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    start = len(sample.prompt_ids)
    places = [start + t for t, is_action in enumerate(sample.loss_mask) if is_action]
    return torch.stack([logprobs[place - 1, ids[0, place]] for place in places])


def loss_batch(
    agent, method: AnyMethodSettings, sample: LearnerSample, **options
) -> tuple[LossBatch, Learner]:
    learner = Learner(agent, make_method(method), LearningSettings(), SAMPLING, **options)
    other = LearnerSample((4, 21), (6, 1), (-1.0, -1.0), -2.0, 2, agent.name, True, -0.5)
    return learner.loss_batch([sample, other], updates_done=0), learner


@pytest.mark.parametrize(
    ("learner", "source"), [(CHAR, CHAR), (TWIN, CHAR), (CHAR, PAIR), (PAIR, CHAR)],
    ids=["own", "same tokenizer", "retokenised", "retokenised to fewer tokens"],
)  # fmt: skip
def test_loss_and_gradient_of_action_tokens_alone(learner, source) -> None:
    settings = NaiveSettings(clip_low=0.99, clip_high=10.0)  # nothing is clipped: the loss is -s A
    sample = multi_turn(build(learner, source, settings))
    batch, mine = loss_batch(learner, settings, sample)
    assert batch.mask_BT[0].tolist() == list(sample.loss_mask)
    expected_T = action_logprobs(learner, sample)
    found_T = batch.logprobs_BT[0][batch.mask_BT[0]]
    torch.testing.assert_close(found_T, expected_T, atol=1e-5, rtol=0)
    assert batch.logprobs_BT[0][~batch.mask_BT[0]].tolist() == [0.0] * (~batch.mask_BT[0]).sum()

    source_actions = two_actions(source)
    expected_s = torch.exp((expected_T.sum() - source_actions.logprob) / source_actions.num_tokens)
    expected = -expected_s * sample.advantage
    terms = mine.method.loss(batch)
    torch.testing.assert_close(terms.ratio_B[0], expected_s.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(terms.loss_B[0], expected, atol=1e-5, rtol=1e-5)
    parameters = list(learner.model.parameters())
    for one, other in zip(
        torch.autograd.grad(terms.loss_B[0], parameters),
        torch.autograd.grad(expected, parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_token_ratios_of_grpo_are_aligned_behind_an_observation() -> None:
    settings = GrpoSettings(clip_low=0.99, clip_high=10.0)
    sample = multi_turn(build(CHAR, CHAR, settings))
    batch, mine = loss_batch(CHAR, settings, sample)
    assert batch.behaviour_logprobs_BT[0].tolist() == [-0.25, -0.5, 0.0, 0.0, -0.75, -1.0]
    ratios_T = torch.exp(action_logprobs(CHAR, sample) - torch.tensor([-0.25, -0.5, -0.75, -1.0]))
    expected = -(ratios_T * sample.advantage).sum() / 4
    torch.testing.assert_close(mine.method.loss(batch).loss_B[0], expected, atol=1e-5, rtol=1e-5)


def test_recomputed_old_policy_and_reference_leave_observations_out() -> None:
    settings = HacpoSettings(kl_coefficient=0.1)
    sample = multi_turn(build(CHAR, CHAR, settings))
    batch, mine = loss_batch(CHAR, settings, sample, exact_sampler=False)
    own_T = action_logprobs(CHAR, sample).detach()
    torch.testing.assert_close(batch.behaviour_logprob_B[0], own_T.sum(), atol=1e-5, rtol=0)
    assert batch.sampler_logprobs_BT[0].tolist() == [-0.25, -0.5, 0.0, 0.0, -0.75, -1.0]
    assert batch.reference_logprobs_BT[0][2:4].tolist() == [0.0, 0.0]
    terms = mine.method.loss(batch)
    assert float(terms.ratio_B[0]) == 1.0
    weight = min(math.exp(float(own_T.sum()) + 2.5), mine._settings.mismatch_cap)
    assert float(terms.weight_B[0]) == pytest.approx(weight, rel=1e-4)


def test_the_gap_is_that_of_action_tokens() -> None:
    agent = char_agent("ada")
    sample = multi_turn(build(agent, agent, NaiveSettings()))
    expected = (torch.tensor([-0.25, -0.5, -0.75, -1.0]) - action_logprobs(agent, sample).detach()).tolist()
    learner = Learner(agent, make_method(NaiveSettings()), LearningSettings(lr=1e-9), SAMPLING)
    stats = learner.learn([sample], updates=1, seed=0)
    assert stats.sampler_differences == pytest.approx(expected, abs=1e-5)


def test_packed_and_padded_passes_agree_and_skip_observations() -> None:
    pairs = [((4, 21), (4, 4, 18, 5, 12, 1)), ((4, 21), (10, 1)), ((5, 6, 21), (7, 18, 8))]
    masks = [(T, T, F, F, T, T), (T, T), (F, F, T)]
    with torch.no_grad():
        packed = packed_logprobs(CHAR.model, pairs, SAMPLING, torch.device("cpu"), masks)
        padded = padded_logprobs(CHAR.model, pairs, SAMPLING, torch.device("cpu"), masks)
        for row, (prompt, response) in enumerate(pairs):
            mask = torch.tensor(masks[row])
            expected = plain_logprobs(CHAR.model, prompt, response, SAMPLING).masked_fill(~mask, 0.0)
            for found in (packed[row], padded[row]):
                torch.testing.assert_close(found[: len(response)], expected, atol=1e-5, rtol=0)
                assert found[len(response) :].tolist() == [0.0] * (6 - len(response))
    assert response_mask(pairs, masks).tolist() == [
        [T, T, F, F, T, T],
        [T, T, F, F, F, F],
        [F, F, T, F, F, F],
    ]
