"""learning.mask_truncated: responses that the length limit cut carry no loss, but their rewards count."""

from __future__ import annotations

import pytest

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import GspoSettings, NaiveSettings
from hacrl.rollouts.groups import PromptGroup
from hacrl.training.samples import LearnerSamples, SampleBuilder
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.tiny import char_agent, pair_agent
from tests.training.runs import Runs, assert_same_weights

ADA, BOB = char_agent("ada"), pair_agent("bob")
EXACT = Normaliser(epsilon=0.0)


def build(cap: int | None = None, **options: bool) -> LearnerSamples:
    """Ada's samples of ada "7" 1, "1" cut 0 and bob "77" cut 1, "17" 1; all four have their own tokens."""
    said = {
        "ada": (judged(rollout(ADA, "7"), 1.0), judged(rollout(ADA, "1", stopped=False), 0.0)),
        "bob": (judged(rollout(BOB, "77", stopped=False), 1.0), judged(rollout(BOB, "17"), 1.0)),
    }
    method = make_method(NaiveSettings(), normaliser=EXACT)
    builder = SampleBuilder(ADA, method, max_cross_rollouts=cap, **options)
    return builder.build([PromptGroup(problem("1:"), said)], lambda *_: 1.0)


def test_cut_responses_of_all_agents_are_left_out_and_counted() -> None:
    built = build(mask_truncated=True)
    assert built.dropped == {("ada", "truncated"): 1, ("bob", "truncated"): 1}
    # rewards 1 0 1 1: mean .75, sigma .5, so the others' advantage is (1 - .75) / .5, as if nothing were cut
    assert [one.source for one in built.samples] == ["ada", "bob"]
    assert [one.advantage for one in built.samples] == pytest.approx([0.5, 0.5])


def test_cut_responses_are_learnt_by_default() -> None:
    built = build()
    assert built.dropped == {}
    assert [one.advantage for one in built.samples] == pytest.approx([0.5, -1.5, 0.5, 0.5])


def test_a_cut_response_of_another_agent_is_replaced_below_the_cap() -> None:
    """Whichever of bob's two equally good responses is chosen first, ada gets the one that ended."""
    built = build(cap=1, mask_truncated=True)
    cross = [one for one in built.samples if not one.is_own]
    assert [one.response_ids for one in cross] == [(4, 10, 1)]  # "1", "7", stop


def test_a_run_counts_what_every_learner_left_out(runs: Runs) -> None:
    run = runs("char", "pair", steps=1, learning={"mask_truncated": True})
    (metrics,) = run.steps
    cut = {
        name: sum(one.rollout.finish_reason == "length" for one in run.watcher.rollouts[1, name])
        for name in ("char", "pair")
    }
    assert 0 < min(cut.values()) <= max(cut.values()) <= 16
    for name in ("char", "pair"):
        dropped = metrics[name]["learning"]["dropped"]
        assert {source: reasons["truncated"] for source, reasons in dropped.items()} == cut
        # the capability is the mean reward of all responses, those that were cut included
        rewards = [one.reward for one in run.watcher.rollouts[1, name]]
        assert metrics[name]["rollout"]["reward"] == pytest.approx(sum(rewards) / 16)
        assert metrics[name]["capability"] == pytest.approx(max(sum(rewards) / 16, 1e-8))


def test_a_step_in_which_everything_was_cut_makes_no_update(runs: Runs) -> None:
    """Not even for the KL term, which own responses without an advantage have otherwise."""
    method = GspoSettings(kl_coefficient=0.1)
    rollout = {"max_new_tokens": 1, "rollouts_per_prompt": 2}
    masked = runs("char", method=method, steps=1, seed=1, rollout=rollout, learning={"mask_truncated": True})
    (metrics,) = masked.of("char")
    assert metrics["rollout"]["stopped"] == 0  # with this seed
    assert metrics["learning"]["dropped"] == {"char": {"truncated": 8}}
    assert metrics["learning"]["updates"] == 0
    assert_same_weights(masked.weights("char"), runs.initial_weights("char"))
