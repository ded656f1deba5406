"""vLLM of hacrl's own environment, in a child process: the contract of engines, updates, deaths.

Needs an environment that has vLLM: ``python -m pytest tests/vllm -m vllm_installed`` there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import pytest

from hacrl import processes as supervision
from hacrl.config.schema import AgentSettings, VllmSettings
from hacrl.engines.base import Sample
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import child, child_program
from hacrl.engines.vllm.backend import Backend, Request
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import make_vllm_engine
from hacrl.models.agent import Agent
from hacrl.runs.run import run_locally
from hacrl.training.observer import Observer
from hacrl.types import Rollout, Sampling, VerifiedRollout
from tests.engines.engine_contract import EngineContract, EngineOf
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
from tests.vllm.processes import still_there, with_children
from tests.vllm.test_runs import hacpo_run, lines

pytestmark = IN_VLLM
SMALL_CACHE = {"kv_cache_memory_bytes": 107_374_182}
SETTINGS = VllmSettings(mode="child", engine_args=SMALL_CACHE, max_sequences=64, seeded=True)


def engines() -> list[psutil.Process]:
    """Those of this process."""
    return [p for p in psutil.Process().children() if child_program.__name__ in p.cmdline()]


def processes() -> list[psutil.Process]:
    """Engines, and what they have started."""
    return [process for engine in engines() for process in with_children(engine)]


def responses(backend: Backend, asks: Sequence[Request]) -> dict[int, Sample]:
    """By position."""
    return dict(chain.from_iterable(backend.generate(asks)))


class TestVllmChild(EngineContract):
    @pytest.fixture(scope="class")
    def shared(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
        folder = tmp_path_factory.mktemp("child")
        engine = make_vllm_engine(
            engine_agent(), SETTINGS, probe_prompts(engine_agent()), CONTEXT, folder, reads_text=True
        )
        engine.sync()
        started = processes()
        assert len(engines()) == 1
        yield engine
        engine.close()
        engine.close()
        assert still_there(started) == []

    @pytest.fixture
    def engine_of(self, shared: VllmEngine) -> EngineOf:
        def make(agent: Agent, seeded: bool = True) -> VllmEngine:
            settings = VllmSettings(mode="child", seeded=seeded)
            return VllmEngine(agent, AlreadyRunning(shared.backend), settings, probe_prompts(agent))

        return make

    def test_a_guard_ends_the_engine_if_hacrl_is_killed(self, shared: VllmEngine) -> None:
        """What a guard does is shown in tests/test_processes.py."""
        commands = [process.cmdline() for process in psutil.Process().children()]
        (guard,) = [command for command in commands if supervision.__file__ in command]
        (engine,) = engines()
        assert guard[-2:] == [str(os.getpid()), str(-engine.pid)]  # its process group

    def test_weights_may_be_broadcast(self, shared: VllmEngine) -> None:
        agent = engine_agent(seed=5)
        settings = VllmSettings(mode="child", seeded=True, weight_sync="gloo")
        engine = VllmEngine(agent, AlreadyRunning(shared.backend), settings, probe_prompts(agent))
        for version in (1, 2):
            change_weights(agent, seed=version)
            assert engine.sync().weight_sync == "gloo"
            said = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
            assert logprob_gap(agent, said, Sampling(12)) < 1e-4

    def test_responses_that_the_caller_does_not_wait_for_are_aborted(self, engine_of: EngineOf) -> None:
        def stop(place: int, rollout: object) -> None:
            raise KeyboardInterrupt

        engine = engine_of(engine_agent(leaning={"<eos>": -100.0}))
        with pytest.raises(KeyboardInterrupt):
            sample_rollouts(engine, PROBLEMS, 40, Sampling(50), 0, stop)
        assert [r.num_tokens for r in sample_rollouts(engine, PROBLEMS, 1, Sampling(3), 0)] == [3] * 5

    def test_late_replies_are_not_taken_for_those_of_the_next_request(
        self, shared: VllmEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ctrl-C while somebody waits: in a call, then in a generation, and once more when that is left."""
        backend = shared.backend
        assert isinstance(backend, child.ChildBackend)
        ask = Request((5, 6, 7), Sampling(3), (), None)
        said = responses(backend, [ask] * 2)
        assert [len(said[place].token_ids) for place in (0, 1)] == [3, 3]
        line = backend._connection
        assert line is not None

        def interrupt(*_) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(line, "receive", interrupt)
            for use in (lambda: backend.call("hacrl_describe"), lambda: list(backend.generate([ask] * 3))):
                with pytest.raises(KeyboardInterrupt):
                    use()
            patch.setattr(line, "send", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(backend.generate([ask]))
        longer = replace(ask, sampling=Sampling(8))
        said = responses(backend, [longer] * 4)
        assert [len(said[place].token_ids) for place in range(4)] == [8] * 4
        assert backend.call("hacrl_describe")[0]["max_length"] == CONTEXT

    def test_one_refused_request_does_no_harm_to_others(self, shared: VllmEngine) -> None:
        fine, long = (
            Request((5, 6, 7), Sampling(3), (), None),
            Request((5,) * 3 * CONTEXT, Sampling(3), (), None),
        )
        for _ in range(2):
            with pytest.raises(EngineError, match=f"failed while generating: .*{CONTEXT}"):
                list(shared.backend.generate([fine, fine, long]))
            assert sorted(responses(shared.backend, [fine, fine])) == [0, 1]


def test_tied_embeddings_and_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine's life: two updates, killed in the middle of generation, then an update that goes wrong."""
    monkeypatch.setattr(child, "WORKER", "tests.vllm.odd_worker.Forgetful")
    agent = engine_agent("tess", tied=True)
    few = {"max_num_seqs": 8}  # so that responses end one after the other
    settings = VllmSettings(mode="child", seeded=True, engine_args={**SMALL_CACHE, **few})
    engine = make_vllm_engine(agent, settings, probe_prompts(agent), CONTEXT, tmp_path)
    try:
        before = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
        for version in (1, 2):
            change_weights(agent, seed=version)
            after = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
            assert logprob_gap(agent, after, Sampling(12)) < 1e-4
            assert mean_gap(agent, before, Sampling(12)) > 0.3
        rollouts, early = generate_and_kill(engine, lambda: engines()[0])
        assert engine.restarts == 1
        assert len(early) == 3
        assert all(rollouts[place] == rollout for place, rollout in early.items())
        assert logprob_gap(agent, rollouts, Sampling(40)) < 1e-4
        assert {r.policy_version for r in rollouts} == {2}
        with pytest.raises(EngineError, match=r"failed while hacrl_say_no_json: .*not JSON serializable"):
            engine.backend.call("hacrl_say_no_json")
        engine.backend.call("hacrl_break_the_next_step")  # as memory of a GPU that runs out would
        rollouts = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
        assert engine.restarts == 2
        assert "the next step is broken" in engine.take_notes()[-1]
        assert logprob_gap(agent, rollouts, Sampling(12)) < 1e-4
        engine.backend.call("hacrl_forget_the_tied_head")
        change_weights(agent, seed=3)
        with pytest.raises(EngineError, match=r"agent 'tess' is not at the agent's policy after a weight up"):
            engine.sync()
    finally:
        started = processes()
        engine.close()
    assert still_there(started) == []


def a_worker() -> psutil.Process:
    """What an engine computes with, if not by itself."""
    return next(process for process in processes() if "Worker" in process.name())


def generate_and_kill(
    engine: VllmEngine, victim: Callable[[], psutil.Process]
) -> tuple[list[Rollout], dict[int, Rollout]]:
    early: dict[int, Rollout] = {}
    finished: dict[int, Rollout] = {}

    def take(place: int, rollout: Rollout) -> None:
        finished[place] = rollout
        if len(finished) == 3:
            early.update(finished)
            victim().kill()

    rollouts = sample_rollouts(engine, PROBLEMS, 4, Sampling(40), 3, take)
    assert sorted(finished) == list(range(20))
    return rollouts, early


def test_an_engine_with_a_dead_worker_is_restarted(tmp_path: Path) -> None:
    """As with several GPUs, it computes with processes that it has started."""
    agent = engine_agent("dora")
    apart = {"distributed_executor_backend": "mp", "max_num_seqs": 8}
    settings = VllmSettings(mode="child", seeded=True, engine_args={**SMALL_CACHE, **apart})
    engine = make_vllm_engine(agent, settings, probe_prompts(agent), CONTEXT, tmp_path)
    try:
        rollouts, early = generate_and_kill(engine, a_worker)
        assert (engine.restarts, len(early)) == (1, 3)
        assert logprob_gap(agent, rollouts, Sampling(40)) < 1e-4
    finally:
        started = processes()
        engine.close()
    assert len(started) >= 2
    assert still_there(started) == []


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = VllmSettings(mode="child", engine_args={"no_such_option": 1})
    engine = make_vllm_engine(engine_agent("eve"), settings, probe_prompts(engine_agent()), CONTEXT, tmp_path)
    with pytest.raises(EngineError, match=r"vLLM engine of agent 'eve' does not start: .*no_such_option"):
        engine.sync()


def test_a_run_with_two_engines_side_by_side(tmp_path: Path) -> None:
    """Both are at the policy each step begins with, and end with the run."""
    agents = [engine_agent("a", tied=True), engine_agent("b", seed=1, pairs=True)]
    vllm = VllmSettings(mode="child", engine_args=SMALL_CACHE, max_sequences=16)
    for agent in agents:
        agent.save(tmp_path / agent.name)
    fast, plain = (
        AgentSettings(name=name, model=str(tmp_path / agent.name), engine="vllm", vllm=vllm)
        for name, agent in zip(("fast", "plain"), agents, strict=True)
    )
    config = replace(hacpo_run(tmp_path, fast, plain.model, 2), agents=(fast, plain))
    seen: set[psutil.Process] = set()

    class Watcher(Observer):
        def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
            seen.update(processes())

    run_locally(config, [Watcher()], task=SevensTask())
    assert len(seen) >= 2
    assert still_there(sorted(seen, key=lambda process: process.pid)) == []
    folder = tmp_path / "run"
    for number, line in enumerate(lines(folder / "metrics.jsonl")):
        for name in ("fast", "plain"):
            engine = line["agents"][name]["engine"]
            assert (engine["policy_version"], engine["restarts"]) == (2 * number, 0)
            assert engine["logprob_gap"] < 1e-4
            assert line["agents"][name]["learning"]["sampler_gap"] < 1e-4
    for name in ("fast", "plain"):
        assert (folder / "engines" / name / "engine.log").stat().st_size > 0
