"""Whole runs in which one agent answers with vLLM and another one with transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hacrl.config.schema import (
    AgentSettings,
    EvaluationSettings,
    HacpoSettings,
    LearningSettings,
    RolloutSettings,
    RunConfig,
    VllmSettings,
)
from hacrl.rollouts.log import RolloutLog
from hacrl.runs.run import run_locally
from hacrl.training.observer import Observer
from hacrl.types import VerifiedRollout
from tests.support.engines import engine_agent
from tests.support.sevens import SevensTask
from tests.vllm.conftest import Server
from tests.vllm.processes import servers_of, still_there, with_children

pytestmark = pytest.mark.vllm
STEPS, UPDATES = 4, 2

SMALL_CACHE = {"kv_cache_memory_bytes": 107_374_182}


@dataclass
class Watcher(Observer):
    """Remembers what a run shows, and which processes served it."""

    engine_folder: Path
    rollouts: dict[tuple[int, str], list[VerifiedRollout]] = field(default_factory=dict)
    processes: set[psutil.Process] = field(default_factory=set)

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        self.rollouts[step, agent] = list(rollouts)
        for server in servers_of(self.engine_folder):
            self.processes.update(with_children(server))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def hacpo_run(folder: Path, fast: AgentSettings, plain: str, steps: int) -> RunConfig:
    return RunConfig(
        agents=(fast, AgentSettings(name="plain", model=plain)),
        output=str(folder / "run"),
        steps=steps,
        device="cpu",
        threads=1,
        method=HacpoSettings(clip_low=0.2, clip_high=0.28, delta=0.9, delta_step=0.01, cross_upper=10.0),
        rollout=RolloutSettings(prompts_per_step=4, rollouts_per_prompt=4, max_new_tokens=12),
        learning=LearningSettings(lr=5e-3, updates_per_step=UPDATES),
        evaluation=EvaluationSettings(problems=2),
    )


def check_run(folder: Path, watcher: Watcher, way: str, steps: int) -> None:
    """Every step's rollouts are of the policy the step began with, and the engine computed with it."""
    updates = 0
    metrics = lines(folder / "metrics.jsonl")
    logged = list(RolloutLog(folder / "rollouts").read())
    assert len(metrics) == steps
    for number, line in enumerate(metrics, start=1):
        fast, plain = line["agents"]["fast"], line["agents"]["plain"]
        assert plain["engine"] is None
        assert fast["engine"]["policy_version"] == updates
        assert fast["engine"]["weight_sync"] == way
        assert fast["engine"]["restarts"] == 0
        assert fast["engine"]["logprob_gap"] < 1e-4
        shown = [one["policy_version"] for one in logged if one["step"] == number and one["agent"] == "fast"]
        assert shown == [updates] * 16  # 4 prompts, 4 responses each
        assert {v.rollout.policy_version for v in watcher.rollouts[number, "fast"]} == {updates}
        assert fast["learning"]["sampler_gap"] < 1e-4
        updates += UPDATES
        assert fast["policy_version"] == updates
    for learner, source in (("fast", "plain"), ("plain", "fast")):  # both taught each other
        learnt = [line["agents"][learner]["learning"]["sources"] for line in metrics]
        assert sum(sources[source]["used"] for sources in learnt if source in sources) > 0
    timings = lines(folder / "timings.jsonl")
    assert all(line["sync/fast"] > 0 and "sync/plain" not in line for line in timings)
    assert [line["step"] for line in lines(folder / "evaluations.jsonl")] == [0, steps]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_two_agents_with_two_engines_learn_from_each_other(
    vllm_python: str, tmp_path: Path, tied: bool
) -> None:
    """Tied: characters on vLLM, pairs of digits on transformers; untied: the other way round."""
    agents = [engine_agent("a", tied=tied, pairs=not tied), engine_agent("b", seed=1, pairs=tied)]
    for agent in agents:
        agent.save(tmp_path / agent.name)
    vllm = VllmSettings(python=vllm_python, engine_args=SMALL_CACHE, max_sequences=16)
    fast = AgentSettings(name="fast", model=str(tmp_path / "a"), engine="vllm", vllm=vllm)
    config = hacpo_run(tmp_path, fast, str(tmp_path / "b"), STEPS)
    folder = tmp_path / "run"
    watcher = Watcher(folder / "engines" / "fast")
    run_locally(config, [watcher], task=SevensTask())
    assert len(watcher.processes) >= 2
    assert still_there(sorted(watcher.processes, key=lambda process: process.pid)) == []
    assert (folder / "engines" / "fast" / "server.log").stat().st_size > 0
    check_run(folder, watcher, "files", STEPS)


def test_a_run_uses_a_server_that_is_already_there(server: Server, tmp_path: Path) -> None:
    engine_agent("a").save(tmp_path / "a")
    engine_agent("b", seed=1, pairs=True).save(tmp_path / "b")
    vllm = server.settings(weight_sync="gloo", seeded=False)
    fast = AgentSettings(name="fast", model=str(tmp_path / "a"), engine="vllm", vllm=vllm)
    watcher = Watcher(tmp_path / "nothing is started")
    run_locally(hacpo_run(tmp_path, fast, str(tmp_path / "b"), 2), [watcher], task=SevensTask())
    assert watcher.processes == set()
    check_run(tmp_path / "run", watcher, "gloo", 2)
    assert server.engine(engine_agent()).sync().policy_version == 0  # it is still there afterwards


class Phases(Observer):
    """Remembers phases in order; in the second step one engine dies with its first response."""

    def __init__(self, folder: Path, victim: str) -> None:
        self.folder, self.victim = folder, victim
        self.order: list[tuple[int, str, str]] = []
        self.killed = False

    def on_phase(self, step: int, phase: str, agent: str) -> None:
        self.order.append((step, phase, agent))

    def on_response(self, agent: str) -> None:
        if not self.killed and agent == self.victim and self.order[-1][0] == 2:
            self.killed = True
            for server in servers_of(self.folder / "engines" / self.victim):
                server.kill()


def test_two_engines_answer_side_by_side_and_one_that_dies_comes_back(
    vllm_python: str, tmp_path: Path
) -> None:
    for name, pairs in (("left", False), ("right", True)):
        engine_agent(name, seed=pairs, pairs=pairs).save(tmp_path / name)
    vllm = VllmSettings(python=vllm_python, engine_args=SMALL_CACHE, max_sequences=2)
    left, right = (
        AgentSettings(name=name, model=str(tmp_path / name), engine="vllm", vllm=vllm)
        for name in ("left", "right")
    )
    base = hacpo_run(tmp_path, left, str(tmp_path / "right"), 2)
    many = replace(base.rollout, rollouts_per_prompt=16)  # some are right and some are not
    config = replace(base, agents=(left, right), rollout=many, evaluation=EvaluationSettings(problems=0))
    phases = Phases(tmp_path / "run", victim="left")
    run_locally(config, [phases], task=SevensTask())
    asked = [(phase, agent) for step, phase, agent in phases.order if step == 2 and phase != "save"]
    agents = ("left", "right")
    # each answers when it is ready, whichever that is first
    assert sorted(asked[:2]) == [("sync", agent) for agent in agents]
    assert sorted(asked[2:4]) == [("rollout", agent) for agent in agents]
    assert asked[4:] == [(phase, agent) for phase in ("verify", "learn") for agent in agents]
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert [step["agents"]["left"]["engine"]["restarts"] for step in metrics] == [0, 1]
    assert [step["agents"]["right"]["engine"]["restarts"] for step in metrics] == [0, 0]
    for step in metrics:
        for agent in agents:
            assert step["agents"][agent]["learning"]["sampler_gap"] < 1e-4
            assert step["agents"][agent]["learning"]["sources"].keys() == set(agents)
