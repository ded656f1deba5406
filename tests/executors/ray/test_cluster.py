"""Clusters that cannot be joined, have no room, or run other versions: a sentence, and no endless wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from hacrl.config.schema import PlaceSettings, RaySettings, RunConfig
from hacrl.errors import ConfigError, TrainingError
from hacrl.executors.ray import executor as ray_executor
from hacrl.runs.run import LocalRun, run_locally
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import connected


@pytest.fixture
def _cluster() -> Iterator[None]:
    with connected(cores=2):
        yield


def config(folder: Path, **ray_settings: object) -> RunConfig:
    return replace(chaos_config(folder, 1), executor="ray", ray=RaySettings(**ray_settings))  # type: ignore[arg-type]


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cluster can be used at ray.address='127.0.0.1:9'"):
        run_locally(config(tmp_path / "run", address="127.0.0.1:9"))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("_cluster")
def test_no_room_is_said_with_what_was_asked_and_what_is_free(tmp_path: Path) -> None:
    base = config(tmp_path / "run", placement_timeout=1.0)
    large = replace(base.agents[0], place=PlaceSettings(cpus=3))
    with pytest.raises(TrainingError) as error:
        run_locally(replace(base, agents=(large, *base.agents[1:])))
    assert "no room for 1 s (ray.placement_timeout). Asked for: small: 1 x (3 CPU). Free: " in str(
        error.value
    )
    assert "the whole cluster: 2 CPU" in str(error.value)
    assert not (tmp_path / "run").exists()
    for _ in range(100):  # what had found room is given back
        if ray.available_resources().get("CPU") == 2:
            return
        time.sleep(0.2)
    raise AssertionError(ray.available_resources())


@pytest.mark.usefixtures("_cluster")
def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "software", lambda: {"hacrl": "9.9", "torch": "1", "transformers": "1"})
    with pytest.raises(
        ConfigError, match=r"the process of small has hacrl .* this one has hacrl 9.9, torch 1"
    ):
        run_locally(config(tmp_path / "run"))


@pytest.mark.usefixtures("_cluster")
def test_agents_of_one_process_take_turns_in_it(tmp_path: Path) -> None:
    run_locally(chaos_config(tmp_path / "local", 1))
    base = config(tmp_path / "shared")
    shared = tuple(replace(agent, place=PlaceSettings(share="both")) for agent in base.agents)
    with LocalRun(replace(base, agents=shared)) as run:
        executor = run.trainer.executor
        assert isinstance(executor, ray_executor.RayExecutor)
        assert len({facts.pid for facts in executor.processes.values()}) == 1
        run.train()
        run.save()
    assert differing_files(tmp_path / "local", tmp_path / "shared") == []


@pytest.mark.usefixtures("_cluster")
def test_a_silent_agent_counts_as_lost(tmp_path: Path) -> None:
    import os
    import signal

    from hacrl.training.observer import Observer, Phase

    class Stopper(Observer):
        run: LocalRun | None = None
        notes: list[str] = []  # noqa: RUF012 - of this class's one object

        def on_phase(self, step: int, phase: Phase, agent: str) -> None:
            if self.run is not None and phase == "learn" and agent == "small":
                os.kill(self.run.trainer.executor.processes[agent].pid, signal.SIGSTOP)  # type: ignore[attr-defined]
                self.run = None

        def on_note(self, step: int, note: str) -> None:
            self.notes.append(note)

    stopper = Stopper()
    run_locally(chaos_config(tmp_path / "calm", 1))
    with LocalRun(config(tmp_path / "run", patience=20.0), [stopper]) as run:
        stopper.run = run
        run.train()
        run.save()
    assert any("it has made no progress for 20 s (ray.patience=20)" in note for note in stopper.notes)
    assert differing_files(tmp_path / "calm", tmp_path / "run") == []
