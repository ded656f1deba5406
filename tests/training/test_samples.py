"""One learner's samples from all rollouts by hand: two agents, two prompts, two responses each.

Rewards and texts (ada writes characters, bob pairs of digits)::

    prompt "1:"   ada "7" 1, "1" 0        bob "77" 1, "17" 1
    prompt "23:"  ada "2" 0, "3" 0        bob "7+" 1, "119" 0

P_ada = .5 and P_bob = 1, so omega(ada, bob) = .5 and omega(bob, ada) = 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import (
    AnyMethodSettings,
    GspoSettings,
    HacpoSettings,
    NaiveSettings,
)
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.samples import LearnerSamples, SampleBuilder
from hacrl.types import LearnerSample, Rollout
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.texts import decode_response
from tests.support.tiny import char_agent, pair_agent

ADA, BOB = char_agent("ada"), pair_agent("bob")
AGENTS = {"ada": ADA, "bob": BOB}
EXACT = Normaliser(epsilon=0.0)
ANSWERS: dict[str, dict[str, list[tuple[str, float]]]] = {
    "1:": {"ada": [("7", 1), ("1", 0)], "bob": [("77", 1), ("17", 1)]},
    "23:": {"ada": [("2", 0), ("3", 0)], "bob": [("7+", 1), ("119", 0)]},
}


def omega(k: str, j: str) -> float:
    capability = {"ada": 0.5, "bob": 1.0}
    return capability[k] / capability[j]


def groups(answers=ANSWERS, make: Callable[..., Rollout] = rollout) -> list[PromptGroup]:
    return [
        PromptGroup(
            problem(prompt),
            {
                name: tuple(judged(make(AGENTS[name], text, prompt=prompt), reward) for text, reward in said)
                for name, said in by_agent.items()
            },
        )
        for prompt, by_agent in answers.items()
    ]


def build(learner: str, method: AnyMethodSettings, stop: bool = True, given=None) -> LearnerSamples:
    builder = SampleBuilder(AGENTS[learner], make_method(method, normaliser=EXACT), stop)
    return builder.build(groups() if given is None else given, omega)


def advantages(learner: str, built: LearnerSamples) -> dict[tuple[str, str], float]:
    """(source, text in the learner's tokens) -> advantage."""
    texts = {}
    for one in built.samples:
        text = decode_response(AGENTS[learner], tuple(t for t in one.response_ids if t != 1), ())
        assert (one.source, text) not in texts
        texts[one.source, text] = one.advantage
    return texts


def test_hacpo_advantages_reach_their_rollouts() -> None:
    method = HacpoSettings()
    # "1:"  rewards 1 0 1 1: mean .75, sigma sqrt((3 * .0625 + .5625) / 3) = .5
    #       mu_ada = (.5 + .5 * 1) / 2 = .5, mu_bob = (2 * .5 + 1) / 2 = 1
    #       ada (1 - .5) / .5 = 1 and -1; bob 0 and 0
    # "23:" rewards 0 0 1 0: mean .25, sigma .5
    #       mu_ada = (0 + .5 * .5) / 2 = .125, mu_bob = (0 + .5) / 2 = .25
    #       ada -.25 and -.25; bob 1.5 and -.5
    # for ada, bob's count omega(bob, ada) = 2 times; for bob, ada's half
    assert advantages("ada", build("ada", method)) == pytest.approx(
        {
            ("ada", "7"): 1.0,
            ("ada", "1"): -1.0,
            ("bob", "77"): 0.0,
            ("bob", "17"): 0.0,
            ("ada", "2"): -0.25,
            ("ada", "3"): -0.25,
            ("bob", "7+"): 3.0,
            ("bob", "119"): -1.0,
        }
    )
    assert advantages("bob", build("bob", method)) == pytest.approx(
        {
            ("ada", "7"): 0.5,
            ("ada", "1"): -0.5,
            ("bob", "77"): 0.0,
            ("bob", "17"): 0.0,
            ("ada", "2"): -0.125,
            ("ada", "3"): -0.125,
            ("bob", "7+"): 1.5,
            ("bob", "119"): -0.5,
        }
    )


def test_gspo_uses_own_rollouts_only() -> None:
    # ada "1:" 1 0: mean .5, sigma sqrt(.5): ± .5 / sqrt(.5) = ± sqrt(.5); "23:" 0 0: nothing to compare
    root = math.sqrt(0.5)
    built = build("ada", GspoSettings())
    expected = {("ada", "7"): root, ("ada", "1"): -root, ("ada", "2"): 0.0, ("ada", "3"): 0.0}
    assert advantages("ada", built) == pytest.approx(expected)
    assert all(one.is_own for one in built.samples)


def test_a_sample_is_the_learner_s_view() -> None:
    built = build("ada", NaiveSettings())
    by_ids = {one.response_ids: one for one in built.samples}
    # bob's "119" is 2 pairs and a stop token with log-probabilities -.25, -.5, -.75; here it is
    # 3 characters and a stop.
    # naive: (0 - .25) / .5 with the joint mean and sigma of "23:"
    assert by_ids[4, 4, 12, 1] == LearnerSample(
        (5, 6, 21), (4, 4, 12, 1), None, -1.5, 3, "bob", False, -0.5, problem="23:", index=1
    )
    # ada's own "7" keeps its numbers token by token; (1 - .75) / .5
    assert by_ids[10, 1] == LearnerSample(
        (4, 21), (10, 1), (-0.25, -0.5), -0.75, 2, "ada", True, 0.5, problem="1:", index=0
    )


def test_the_stop_token_can_be_excluded() -> None:
    given = groups(
        {"1:": {"ada": [("7", 1), ("1", 0)], "bob": [("119", 1), ("", 0)]}},
        lambda agent, text, prompt: rollout(agent, text, stopped=text != "1", prompt=prompt),
    )
    built = build("ada", NaiveSettings(), stop=False, given=given)
    by_ids = {one.response_ids: one for one in built.samples}
    assert set(by_ids) == {(10,), (4,), (4, 4, 12)}
    assert (by_ids[10,].behaviour_logprobs, by_ids[10,].source_length) == ((-0.25,), 1)
    # bob's two pairs without the stop token: -.25 - .5
    assert (by_ids[4, 4, 12].behaviour_logprob, by_ids[4, 4, 12].source_length) == (-0.75, 2)
    # "1" was cut by the length limit: it has no stop token to leave out
    assert by_ids[4,].behaviour_logprobs == (-0.25,)
    # nothing is left of bob's empty response
    assert built.dropped == {("bob", "empty"): 1}


def test_source_with_the_same_tokenizer_keeps_its_ids() -> None:
    carl = char_agent("carl", seed=4)
    said = (judged(rollout(carl, "7"), 1.0), judged(rollout(carl, "1"), 0.0))
    group = PromptGroup(problem("1:"), {**groups()[0].responses, "carl": said})
    builder = SampleBuilder(ADA, make_method(NaiveSettings()))
    built = builder.build([group], lambda *_: 1.0)
    per_token = {one.source: one.behaviour_logprobs for one in built.samples}
    assert per_token == {"ada": (-0.25, -0.5), "bob": None, "carl": (-0.25, -0.5)}
    assert [one.is_own for one in built.samples if one.source == "carl"] == [False, False]


def test_every_dropped_rollout_has_a_reason_and_counts_in_the_baseline() -> None:
    answers = {"1:": {"ada": [("7", 1), ("1", 0)], "bob": [("7a", 1), ("1" * 70, 1)]}}
    built = build("ada", HacpoSettings(), given=groups(answers))
    # rewards 1 0 1 1 as in "1:" above: the advantages are 1 and -1, not those of ada's group alone
    assert advantages("ada", built) == pytest.approx({("ada", "7"): 1.0, ("ada", "1"): -1.0})
    assert built.dropped == {("bob", "not_representable"): 1, ("bob", "too_long"): 1}


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_rollouts_without_finite_probabilities_are_dropped(broken: float) -> None:
    def make(agent, text: str, prompt: str) -> Rollout:
        logprobs = (-1.0, broken) if text == "7" else None
        return rollout(agent, text, prompt=prompt, logprobs=logprobs)

    built = build("ada", GspoSettings(), given=groups(make=make))
    assert built.dropped == {("ada", "non_finite"): 1}
    assert len(built.samples) == 3


def test_a_response_without_text_or_stop_is_empty() -> None:
    silent = rollout(BOB, "", stopped=False, token_ids=(0,))  # a token that spells nothing
    group = PromptGroup(problem("1:"), {**groups()[0].responses, "bob": (judged(silent, 0.0),)})
    built = build("ada", NaiveSettings(), given=[group])
    assert built.dropped == {("bob", "empty"): 1}


def test_the_order_of_agents_does_not_matter() -> None:
    turned = [PromptGroup(g.problem, dict(reversed(list(g.responses.items())))) for g in groups()]
    for learner in AGENTS:
        assert build(learner, HacpoSettings(), given=turned) == build(learner, HacpoSettings())
