"""An asynchronous run under Ray: agents sample and learn at once, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import AsynchronousSettings, FsdpSettings, ReplicaSettings, RunConfig
from hacrl.runs.run import run_locally
from tests.executors.ray.test_ray_ranks import RankKiller
from tests.support.chaos import chaos_config
from tests.support.ray_cluster import connected

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def asynchronous(folder: Path, ranks: int) -> RunConfig:
    """Two agents that sample with a copy; the first one has ranks."""
    base = chaos_config(folder, STEPS)
    first, *others = (replace(agent, replicas=ReplicaSettings(count=1)) for agent in base.agents)
    first = replace(first, ranks=ranks, fsdp=FsdpSettings(timeout=20.0))
    return replace(
        base,
        agents=(first, *others),
        executor="ray",
        asynchronous=AsynchronousSettings(max_staleness=1),
    )


def check(folder: Path) -> None:
    """All steps are there, the bound holds, and everything was learnt once."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    staleness = [
        source["steps_max"]
        for line in lines
        for agent in line["agents"].values()
        for source in agent["asynchronous"]["staleness"].values()
    ]
    assert len(staleness) == STEPS * 2 * 2
    assert max(staleness) <= 1
    for step in range(1, STEPS + 1):
        for learner in ("small", "llama"):
            path = folder / "rollouts" / f"step-{step:06d}" / "learnt" / f"{learner}.jsonl"
            learnt = [json.loads(line) for line in path.read_text().splitlines()]
            keys = {(row["agent"], row["problem"], row["sample"]) for row in learnt}
            assert len(keys) == len(learnt) == 2 * 4 * 4


def test_an_asynchronous_run_keeps_its_bound_and_learns_everything_once(tmp_path: Path) -> None:
    run_locally(asynchronous(tmp_path / "run", ranks=1))
    check(tmp_path / "run")


@pytest.mark.slow
def test_an_agent_with_ranks_is_rebuilt_after_the_loss_of_one(tmp_path: Path) -> None:
    killer = RankKiller()
    run_locally(asynchronous(tmp_path / "run", ranks=2), [killer])
    assert len(killer.killed) == 3  # its other rank, and the processes of both agents' copies
    assert any("agent 'small' is rebuilt from the checkpoint of step 1" in note for note in killer.notes)
    check(tmp_path / "run")
