"""Runs whose agent samples with several copies: their number changes nothing that is sampled."""

from __future__ import annotations

import pytest

from hacrl.config.schema import GspoSettings, ReplicaSettings
from tests.training.runs import Runs, assert_moved


def test_the_number_of_copies_changes_rounding_alone(runs: Runs) -> None:
    two, three = (
        runs(
            runs.agent("char", replicas=ReplicaSettings(count=count)),
            method=GspoSettings(),
            steps=2,
            evaluation={"problems": 3},
        )
        for count in (2, 3)
    )
    assert_moved(two.weights("char"), runs.initial_weights("char"))
    for key, rollouts in two.watcher.rollouts.items():
        others = three.watcher.rollouts[key]
        assert [one.rollout.token_ids for one in rollouts] == [one.rollout.token_ids for one in others]
        assert [one.reward for one in rollouts] == [one.reward for one in others]
        for one, other in zip(rollouts, others, strict=True):
            assert one.rollout.token_logprobs == pytest.approx(other.rollout.token_logprobs, abs=1e-5)
    for mine, theirs in zip(two.of("char"), three.of("char"), strict=True):
        assert mine["rollout"]["reward"] == theirs["rollout"]["reward"]
        assert max(mine["learning"]["sampler_gap"], theirs["learning"]["sampler_gap"]) < 1e-5
        assert (mine["engine"]["weight_sync"], mine["engine"]["restarts"]) == ("gloo", 0)
        assert mine["engine"]["logprob_gap"] < 1e-5
