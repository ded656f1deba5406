"""Runs whose agents sample with copies of their models."""

from __future__ import annotations

from hacrl.config.schema import ReplicaSettings
from tests.training.runs import Run, Runs, assert_moved, assert_same_weights

# Both runs take the sampler's log-probabilities for those of the old policy.
LEARNING = {"old_policy": "sampler"}


def copied_run(runs: Runs, count: int) -> Run:
    agents = [runs.agent(name, replicas=ReplicaSettings(count=count)) for name in ("char", "pair")]
    return runs(*agents, learning=LEARNING, evaluation={"problems": 3, "every": 1})


def test_copies_sample_what_the_learners_own_weights_sample(runs: Runs) -> None:
    shared, copied = copied_run(runs, 0), copied_run(runs, 1)
    assert copied.watcher.rollouts == shared.watcher.rollouts
    for name in ("char", "pair"):
        assert_moved(copied.weights(name), runs.initial_weights(name))
        assert_same_weights(copied.weights(name), shared.weights(name))
        for mine, theirs in zip(copied.of(name), shared.of(name), strict=True):
            sync = mine.pop("engine")
            assert theirs.pop("engine", None) is None
            assert mine == theirs
            assert (sync["weight_sync"], sync["restarts"]) == ("copy", 0)
            assert sync["logprob_gap"] < 1e-5
