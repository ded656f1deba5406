"""A frozen agent under Ray: the run's files are those of a local run, also if its process is killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import RunConfig
from hacrl.runs.run import LocalRun, run_locally
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import Killer, connected


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def with_frozen_llama(output: Path, executor: str) -> RunConfig:
    config = chaos_config(output, 2)
    agents = tuple(replace(agent, frozen=agent.name == "llama") for agent in config.agents)
    return replace(config, agents=agents, executor=executor)


def test_a_frozen_agent_is_loaded_again_if_its_process_is_killed(tmp_path: Path) -> None:
    run_locally(with_frozen_llama(tmp_path / "calm", "local"))
    killer = Killer([(2, "rollout", "llama")])
    with LocalRun(with_frozen_llama(tmp_path / "killed", "ray"), [killer]) as run:
        killer.run = run
        run.train()
        run.save()
    assert "agent 'llama' is loaded again; it is frozen and has nothing to learn" in killer.notes
    assert differing_files(tmp_path / "calm", tmp_path / "killed") == []
    assert [path.name for path in (tmp_path / "killed" / "agents").iterdir()] == ["small"]
