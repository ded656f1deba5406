"""How old tokens are, in steps and in updates, by hand."""

from __future__ import annotations

import pytest

from hacrl.training.asynchronous.late import LateRollouts
from hacrl.training.asynchronous.staleness import (
    UNKNOWN_VERSION,
    Staleness,
    VersionHistory,
    staleness,
    tokens_by_version,
    with_unknown_versions,
)
from hacrl.types import Rollout, VersionSpans
from tests.support.rollouts import judged
from tests.support.sevens import problem


def sampled_by(version: int, tokens: int, versions: VersionSpans = ()):
    """Return a rollout of so many tokens."""
    rollout = Rollout.single_turn(
        problem("1:"),
        "ada",
        "7" * tokens,
        (10,) * tokens,
        (-1.0,) * tokens,
        "length",
        version,
        "t",
        (4,),
        versions,
    )
    return judged(rollout, 1.0)


def test_tokens_of_two_versions() -> None:
    # the source made 4 updates in each of its steps 1 to 3: versions 0, 4, 8, 12
    source = VersionHistory([0])
    for _ in range(3):
        source.finish_step(4)
    rollouts = [sampled_by(4, 3), sampled_by(4, 5, ((4, 2), (8, 3)))]
    assert tokens_by_version(rollouts) == {4: 5, 8: 3}
    # learnt in step 4, when 3 steps and 12 updates were made: five tokens are 2 steps and 8 updates old,
    # three are 1 step and 4 updates old. (5 * 2 + 3 * 1) / 8 = 1.625; (5 * 8 + 3 * 4) / 8 = 6.5
    assert staleness(tokens_by_version(rollouts), source, step=4) == Staleness(1.625, 2, 6.5, 8)
    # learnt in step 3, from the source's policy after step 2 with 8 updates
    assert staleness(tokens_by_version(rollouts), source, step=3) == Staleness(5 / 8, 1, 20 / 8, 4)
    assert staleness({}, source, step=3) is None


def test_a_synchronous_step_has_no_staleness() -> None:
    source = VersionHistory([7])  # an agent that was trained before
    source.finish_step(3)
    assert staleness({10: 6}, source, step=2) == Staleness(0.0, 0, 0.0, 0)


def test_a_step_without_updates_does_not_age_a_policy() -> None:
    source = VersionHistory([0])
    for updates in (2, 0, 0, 2):  # versions 0, 2, 2, 2, 4
        source.finish_step(updates)
    assert [source.step_of(version, most=4) for version in (0, 2, 3, 4, 9)] == [0, 3, 3, 4, 4]
    assert source.step_of(2, most=2) == 2
    assert source.step_of(UNKNOWN_VERSION, most=4) == 0
    # sampled after step 1, learnt in step 4: the policy after step 3 is the same one
    assert staleness({2: 5}, source, step=4) == Staleness(0.0, 0, 0.0, 0)
    assert staleness({0: 1, 2: 1}, source, step=5) == Staleness((4 + 1) / 2, 4, (4 + 2) / 2, 4)
    assert VersionHistory(source.as_json()).as_json() == [0, 2, 2, 2, 4]


def test_rollouts_of_a_lost_policy_have_no_version_that_a_policy_can_have() -> None:
    lost = with_unknown_versions(sampled_by(4, 5, ((4, 2), (8, 3))))
    assert lost.rollout.versions == ((UNKNOWN_VERSION, 5),)
    assert lost.rollout.token_logprobs == (-1.0,) * 5


@pytest.mark.parametrize(
    ("usable", "step", "teaching", "dropped", "waiting"),
    [
        (None, 3, {}, {}, True),  # batch 2 is not there yet, and could be 3 - 2 = 1 step old
        (None, 4, {}, {2: ["bob"]}, False),  # it would be 4 - 2 = 2 steps old at least: too much
        (True, 3, {2: ["bob"]}, {}, False),
        (False, 3, {}, {2: ["bob"]}, False),
    ],
)
def test_late_rollouts_teach_once_or_never(usable, step, teaching, dropped, waiting) -> None:
    late = LateRollouts(max_staleness=1)
    late.leave_out("ada", 2, ["bob"])
    late.leave_out("ada", 2, [])  # nothing more is left out
    restored = LateRollouts(max_staleness=1)
    restored.load_json(late.as_json())
    for one in (late, restored):
        assert one.oldest_batch() == 2
        assert one.take("ada", step, lambda batch, source: usable) == (teaching, dropped)
        assert one.oldest_batch() == (2 if waiting else None)
        if not waiting:
            assert one.take("ada", step + 1, lambda batch, source: True) == ({}, {})
    assert late.take("carl", step, lambda batch, source: True) == ({}, {})
