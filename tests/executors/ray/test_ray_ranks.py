"""An agent with two ranks in two actors is the agent with two ranks in child processes, also after a loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import FsdpSettings, RunConfig
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import connected, member_processes


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected():
        yield


def config(folder: Path, executor: str) -> RunConfig:
    base = chaos_config(folder, 2)
    first = replace(base.agents[0], ranks=2, fsdp=FsdpSettings(timeout=20.0))
    return replace(base, agents=(first, *base.agents[1:]), executor=executor)


class RankKiller(Observer):
    """Kills the second rank when its agent learns in step 2."""

    def __init__(self) -> None:
        self.killed: list[int] = []
        self.notes: list[str] = []

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if (step, phase, agent) == (2, "learn", "small") and not self.killed:
            self.killed = member_processes()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)


def test_ranks_in_actors_learn_what_ranks_in_child_processes_learn(tmp_path: Path) -> None:
    run_locally(config(tmp_path / "local", "local"))
    killer = RankKiller()
    with LocalRun(config(tmp_path / "ray", "ray"), [killer]) as run:
        run.train()
        run.save()
    assert len(killer.killed) == 1
    assert any("agent 'small' is rebuilt from the checkpoint of step 1" in note for note in killer.notes)
    assert differing_files(tmp_path / "local", tmp_path / "ray") == []
