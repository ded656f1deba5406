"""Replicas in actors sample what replicas in child processes sample, also if one is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import ReplicaSettings, RunConfig
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import connected, member_processes


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def config(folder: Path, executor: str) -> RunConfig:
    base = chaos_config(folder, 3)
    first = replace(base.agents[0], replicas=ReplicaSettings(count=2))
    return replace(base, agents=(first, *base.agents[1:]), executor=executor)


class ReplicaKiller(Observer):
    """Kills a replica when its agent begins to sample in step 2."""

    def __init__(self) -> None:
        self.killed = 0
        self.notes: list[str] = []

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (step, phase, agent) == (2, "rollout", "small") and not self.killed:
            self.killed = min(member_processes())
            os.kill(self.killed, signal.SIGKILL)

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)


def test_replicas_in_actors_sample_the_same_also_after_a_loss(tmp_path: Path) -> None:
    run_locally(config(tmp_path / "local", "local"))
    killer = ReplicaKiller()
    with LocalRun(config(tmp_path / "ray", "ray"), [killer]) as run:
        assert len(member_processes()) == 2
        run.train()
        run.save()
    assert killer.killed
    assert any("replica" in note for note in killer.notes), killer.notes
    assert differing_files(tmp_path / "local", tmp_path / "ray") == []
