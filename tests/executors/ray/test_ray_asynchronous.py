"""An asynchronous run under Ray: agents sample and learn at once, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import AsynchronousSettings, ReplicaSettings
from hacrl.runs.run import run_locally
from tests.support.chaos import chaos_config
from tests.support.ray_cluster import connected

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def test_an_asynchronous_run_keeps_its_bound_and_learns_everything_once(tmp_path: Path) -> None:
    base = chaos_config(tmp_path / "run", STEPS)
    agents = tuple(replace(agent, replicas=ReplicaSettings(count=1)) for agent in base.agents)
    result = run_locally(
        replace(base, agents=agents, executor="ray", asynchronous=AsynchronousSettings(max_staleness=1))
    )
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
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
            path = tmp_path / "run" / "rollouts" / f"step-{step:06d}" / "learnt" / f"{learner}.jsonl"
            learnt = [json.loads(line) for line in path.read_text().splitlines()]
            keys = {(row["agent"], row["problem"], row["sample"]) for row in learnt}
            assert len(keys) == len(learnt) == 2 * 4 * 4
