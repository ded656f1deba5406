"""Rewards of failed episodes count nowhere: not in advantages, baselines, capabilities or means.

Rewards ("x": the environment failed; its verdict has reward 0)::

    ada "7" 1, "3" x, "1" 0        bob "7" x, "77" 0.5
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hacrl.algorithms.advantage import Normaliser
from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AnyMethodSettings, GspoSettings, HacpoSettings
from hacrl.rollouts.groups import PromptGroup, rewards_that_count
from hacrl.training.asynchronous.ledger import rewards_of
from hacrl.training.episode_metrics import episodes_report
from hacrl.training.health.collapse import CollapseDetector
from hacrl.training.metrics import rollout_report
from hacrl.training.samples import LearnerSamples, SampleBuilder, compared_rewards
from hacrl.types import Episode, EpisodeEnd, Segment, ToolCall, Turn, Verdict, VerifiedRollout
from tests.support.rollouts import judged, rollout
from tests.support.sevens import problem
from tests.support.tiny import char_agent, pair_agent

ADA, BOB = char_agent("ada"), pair_agent("bob")
EXACT = Normaliser(epsilon=0.0)


def played(agent, text: str, reward: float | None, failure: str = "died") -> VerifiedRollout:
    """An episode of one turn; ``reward`` None: its environment failed."""
    end: EpisodeEnd = "failed" if reward is None else "done"
    episode = Episode(
        end, agent.dialect.fingerprint, reward=reward, failure="" if reward is not None else failure
    )
    one = replace(rollout(agent, text), episode=episode)
    return judged(one, reward) if reward is not None else VerifiedRollout(one, Verdict(0.0, "crash"))


def group(**changes: tuple[VerifiedRollout, ...]) -> PromptGroup:
    responses = {
        "ada": (played(ADA, "7", 1.0), played(ADA, "3", None), played(ADA, "1", 0.0)),
        "bob": (played(BOB, "7", None), played(BOB, "77", 0.5)),
        **changes,
    }
    return PromptGroup(problem("1:"), responses)


def build(method: AnyMethodSettings, given: PromptGroup) -> LearnerSamples:
    omega = {("ada", "bob"): 0.5, ("bob", "ada"): 2.0}
    builder = SampleBuilder(ADA, make_method(method, normaliser=EXACT))
    return builder.build([given], lambda k, j: omega.get((k, j), 1.0))


def test_hacpo_compares_the_others() -> None:
    """Rewards 1, 0 and 0.5: mean 0.5, sigma = sqrt((0.25 + 0.25 + 0) / 2) = 0.5.

    mu_ada = (0.5 + 0.5 * 0.5) / 2 = 0.375, so ada has (1 - 0.375) / 0.5 = 1.25 and -0.375 / 0.5 = -0.75.
    mu_bob = (2 * 0.5 + 0.5) / 2 = 0.75: (0.5 - 0.75) / 0.5 = -0.5, which counts omega(bob, ada) = 2 times.
    """
    built = build(HacpoSettings(), group())
    found = {(one.source, one.index): one.advantage for one in built.samples}
    assert found == pytest.approx({("ada", 0): 1.25, ("ada", 2): -0.75, ("bob", 1): -1.0})
    assert built.baselines == pytest.approx([0.375])
    assert built.dropped == {("ada", "environment_failed"): 1, ("bob", "environment_failed"): 1}
    fates = [(one.agent, one.sample, one.fate) for one in built.not_used]
    assert fates == [("ada", 1, "environment_failed"), ("bob", 0, "environment_failed")]


def test_gspo_compares_own_rewards_alone() -> None:
    """1 and 0: mean 0.5, sigma sqrt(0.5), so +-0.7071. What failed for bob is nothing to ada."""
    built = build(GspoSettings(), group())
    found = {(one.source, one.index): one.advantage for one in built.samples}
    assert found == pytest.approx({("ada", 0): 0.70710678, ("ada", 2): -0.70710678})
    assert built.dropped == {("ada", "environment_failed"): 1}


def test_a_learner_whose_own_episodes_all_failed_has_nothing_to_compare() -> None:
    given = group(ada=(played(ADA, "7", None), played(ADA, "3", None)))
    built = build(HacpoSettings(), given)
    assert (built.samples, built.baselines, built.has_signal) == ([], [], [False])
    fates = sorted((one.agent, one.sample, one.fate) for one in built.not_used)
    assert fates == [
        ("ada", 0, "environment_failed"),
        ("ada", 1, "environment_failed"),
        ("bob", 0, "environment_failed"),
        ("bob", 1, "not_shared"),
    ]
    assert (
        build(HacpoSettings(), group(bob=(played(BOB, "7", None),))).dropped["bob", "environment_failed"] == 1
    )


def test_rewards_that_count() -> None:
    assert group().rewards == {"ada": (1.0, 0.0), "bob": (0.5,)}
    failed = (played(BOB, "7", None),)
    assert group(bob=failed).rewards == {"ada": (1.0, 0.0)}
    # with the overlong punishment: every text and its stop token take 2 of at most 2 tokens, buffer 1: -1
    assert compared_rewards(group(), (2, 1)) == {"ada": (0.0, -1.0), "bob": (-0.5,)}
    assert rewards_that_count(group().responses["ada"]) == [1.0, 0.0]
    assert rewards_of({"ada": group().responses["ada"], "bob": failed}) == {"ada": [1.0, 0.0]}


def test_the_report_leaves_them_out_and_counts_them() -> None:
    verified = [
        *group().responses["ada"],
        played(ADA, "5", None, "raised ValueError: x"),
        played(ADA, "6", None),
    ]
    report = rollout_report(verified)
    assert report.reward == 0.5  # of 1 and 0
    assert report.verdicts == {"correct": 1, "crash": 3, "wrong": 1}
    assert (report.all_right, report.all_wrong) == (0.0, 0.0)
    assert report.episodes is not None
    assert report.episodes.failed == 3
    assert report.episodes.timeouts == 0
    assert report.episodes.ends == {"done": 2, "failed": 3}
    assert report.episodes.failures == {"died": 2, "raised ValueError: x": 1}


def test_the_report_counts_turns_and_calls() -> None:
    """Two episodes: of two actions with three calls and an observation of 2 tokens, and of one action."""
    call = ToolCall("add", "{}")
    segments = (
        Segment("action", "a", (4,), (-1.0,), turns=(Turn("assistant", "", (call, call)),)),
        Segment("observation", "bc", (5, 6), turns=(Turn("tool", "b", tool="add"),)),
        Segment("action", "d", (7,), (-1.0,), turns=(Turn("assistant", "", (call,)),)),
    )
    first = played(ADA, "7", 1.0).rollout
    episode = replace(first.episode, tool_errors=2, unread_calls=("x",), failure_kind="", end="max_turns")
    long = replace(first, segments=segments, episode=episode, finish_reason="length")
    late = replace(first, episode=replace(first.episode, end="failed", failure="f", failure_kind="timeout"))
    report = episodes_report([judged(long, 1.0), VerifiedRollout(late, Verdict(0.0, "timeout"))])
    assert report is not None
    assert (report.turns, report.tool_calls, report.observation_tokens) == (1.5, 1.5, 1.0)
    assert (report.tool_errors, report.unread_calls, report.failed, report.timeouts) == (2, 1, 1, 1)
    assert report.ends == {"failed": 1, "max_turns": 1}
    assert episodes_report([judged(rollout(ADA, "7"), 1.0)]) is None


def test_failed_episodes_are_no_sign_of_a_collapse() -> None:
    """Twenty steps without a reward would be one; here no policy has anything to do with it."""
    failed, wrong = [played(ADA, "3", None)], [played(ADA, "1", 0.0)]
    detector = CollapseDetector(["ada"])
    assert [note for _ in range(30) for note in detector.update({"ada": failed})] == []
    notes = [note for _ in range(30) for note in detector.update({"ada": [*failed, *wrong]})]
    assert len(notes) == 1
