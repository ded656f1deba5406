"""Two vLLM engines of one agent in child processes: weights, seeds, a death, and a whole run.

Needs an environment that has vLLM: ``python -m pytest tests/vllm -m vllm_installed`` there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hacrl.config.schema import AgentSettings, VllmSettings
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import make_vllm_engine, make_vllm_engines
from hacrl.engines.vllm.several import VllmEngines
from hacrl.runs.run import run_locally
from hacrl.types import Rollout, Sampling
from tests.support.engines import (
    CONTEXT,
    PROBLEMS,
    AlreadyRunning,
    change_weights,
    engine_agent,
    logprob_gap,
    mean_gap,
    probe_prompts,
    sample_rollouts,
)
from tests.support.sevens import SevensTask
from tests.vllm.marks import IN_VLLM
from tests.vllm.processes import still_there
from tests.vllm.test_child import SMALL_CACHE, engines, processes
from tests.vllm.test_runs import hacpo_run, lines

pytestmark = IN_VLLM
FEW = {**SMALL_CACHE, "max_num_seqs": 8}  # so that responses end one after the other
TWO = VllmSettings(mode="child", seeded=True, engines=2, engine_args=FEW)
SAMPLING = Sampling(40)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngines]:
    folder = tmp_path_factory.mktemp("two")
    agent = engine_agent("tess", tied=True)
    found = make_vllm_engines(agent, TWO, probe_prompts(agent), CONTEXT, folder)
    assert isinstance(found, VllmEngines)
    found.sync()
    started = processes()
    assert len(engines()) == 2
    yield found
    found.close()
    assert still_there(started) == []


def alone(two: VllmEngines, number: int) -> VllmEngine:
    """One of the two engines, as the only one of the agent."""
    agent, settings = two.policy, replace(TWO, engines=1)
    return VllmEngine(agent, AlreadyRunning(two.engines[number].backend), settings, probe_prompts(agent))


def same(found: list[Rollout], expected: list[Rollout]) -> bool:
    """Equal tokens; log-probabilities depend on the batch by rounding."""
    return [one.token_ids for one in found] == [one.token_ids for one in expected]


@pytest.mark.parametrize("way", ["files", "gloo"])
def test_weights_reach_both_and_seeds_decide_the_responses(two: VllmEngines, way: str) -> None:
    agent = two.policy
    for engine in two.engines:
        engine._settings = replace(engine._settings, weight_sync=way)
        engine._transport = None
    before = sample_rollouts(two, PROBLEMS, 2, SAMPLING, seed=3)
    change_weights(agent, seed=agent.policy_version)
    report = two.sync()
    assert (report.policy_version, report.weight_sync) == (agent.policy_version, way)
    assert report.logprob_gap < 1e-4
    together = sample_rollouts(two, PROBLEMS, 2, SAMPLING, seed=3)
    assert logprob_gap(agent, together, SAMPLING) < 1e-4
    assert mean_gap(agent, before, SAMPLING) > 0.3
    for number in (0, 1):  # each of them has the weights, and says the same with the same seeds
        own = sample_rollouts(alone(two, number), PROBLEMS, 2, SAMPLING, seed=3)
        assert same(own, together)


def test_a_dead_engine(two: VllmEngines) -> None:
    agent = two.policy
    undisturbed = sample_rollouts(two, PROBLEMS, 4, SAMPLING, seed=3)
    finished: dict[int, Rollout] = {}
    victim = engines()[1]

    def take(place: int, rollout: Rollout) -> None:
        assert place not in finished
        finished[place] = rollout
        if len(finished) == 3:
            victim.kill()

    rollouts = sample_rollouts(two, PROBLEMS, 4, SAMPLING, 3, take)
    assert sorted(finished) == list(range(20))
    assert same(rollouts, undisturbed)
    assert logprob_gap(agent, rollouts, SAMPLING) < 1e-4
    (note,) = two.take_notes()
    assert "of agent 'tess' (number " in note
    assert note.endswith("the next weight sync starts it again")
    assert len(engines()) == 1
    change_weights(agent, seed=agent.policy_version)
    report = two.sync()
    assert len(engines()) == 2
    assert report.logprob_gap < 1e-4
    assert report.restarts == 1
    assert logprob_gap(agent, sample_rollouts(two, PROBLEMS, 4, SAMPLING, seed=4), SAMPLING) < 1e-4


def test_a_run_with_two_engines_of_one_agent(tmp_path: Path) -> None:
    """The log-probabilities of both engines are the learner's in every step."""
    agents = [engine_agent("a", tied=True), engine_agent("b", seed=1, pairs=True)]
    for agent in agents:
        agent.save(tmp_path / agent.name)
    vllm = VllmSettings(mode="child", engine_args=SMALL_CACHE, max_sequences=16, seeded=True, engines=2)
    fast = AgentSettings(name="fast", model=str(tmp_path / "a"), engine="vllm", vllm=vllm)
    config = hacpo_run(tmp_path, fast, str(tmp_path / "b"), 2)
    before = set(processes())
    run_locally(config, [], task=SevensTask())
    assert set(processes()) == before
    for number, line in enumerate(lines(tmp_path / "run" / "metrics.jsonl")):
        engine = line["agents"]["fast"]["engine"]
        assert (engine["policy_version"], engine["restarts"]) == (2 * number, 0)
        assert engine["logprob_gap"] < 1e-4
        assert line["agents"]["fast"]["learning"]["sampler_gap"] < 1e-4
    for number in (0, 1):
        log = tmp_path / "run" / "engines" / "fast" / f"engine-{number}" / "engine.log"
        assert log.stat().st_size > 0


def test_one_engine_is_no_group(tmp_path: Path) -> None:
    agent = engine_agent()
    one = make_vllm_engines(agent, replace(TWO, engines=1), probe_prompts(agent), CONTEXT, tmp_path)
    assert type(one) is type(make_vllm_engine(agent, TWO, probe_prompts(agent), CONTEXT, tmp_path))
