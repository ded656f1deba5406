"""A server that hacrl starts for an agent with tied embeddings: it learns, it dies, it is brought back.

The tests share one server, which costs half a minute to start; who needs it asks for it by ``prepare``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import client
from hacrl.engines.vllm import engine as vllm_engine
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import make_vllm_engine
from hacrl.models.agent import Agent
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
from tests.vllm.conftest import wait_until
from tests.vllm.processes import engine_core, servers_of, still_there, with_children

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(40)  # long enough to be killed in the middle


@dataclass
class Own:
    """An engine that hacrl looks after."""

    engine: VllmEngine
    agent: Agent
    settings: VllmSettings
    folder: Path

    @property
    def server(self) -> psutil.Process:
        (found,) = servers_of(self.folder)
        return found

    def beside(self, agent: Agent, **options) -> VllmEngine:
        """Another engine on the same server, which does not start it."""
        settings = VllmSettings(python=self.settings.python, seeded=True, **options)
        return VllmEngine(agent, AlreadyRunning(self.engine.backend), settings, probe_prompts(agent))


@pytest.fixture(scope="module")
def own(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Own]:
    folder = tmp_path_factory.mktemp("own")
    agent = engine_agent("tess", tied=True)
    settings = VllmSettings(
        python=vllm_python,
        seeded=True,
        # so few sequences that responses end one after the other
        engine_args={"kv_cache_memory_bytes": 107_374_182, "max_num_seqs": 8},
    )
    engine = make_vllm_engine(agent, settings, probe_prompts(agent), CONTEXT, folder)
    yield Own(engine, agent, settings, folder)
    engine.close()
    engine.close()  # may be called more than once
    assert servers_of(folder) == []


@pytest.mark.parametrize("way", ["files", "gloo"])
def test_tied_embeddings_arrive_at_both_ends(own: Own, way: str) -> None:
    own.engine.sync()
    agent = engine_agent("other", seed=5, tied=True)
    engine = own.beside(agent, weight_sync=way)
    before = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
    assert logprob_gap(agent, before, Sampling(12)) < 1e-4
    for version in (1, 2):
        change_weights(agent, seed=version)
        report = engine.sync()
        assert (report.policy_version, report.weight_sync) == (version, way)
        assert report.logprob_gap < 1e-4
        after = sample_rollouts(engine, PROBLEMS, 2, Sampling(12), seed=0)
        assert logprob_gap(agent, after, Sampling(12)) < 1e-4
        assert mean_gap(agent, before, Sampling(12)) > 0.3


def generate_and_kill(own: Own, victim: psutil.Process) -> tuple[list[Rollout], dict[int, Rollout]]:
    """All responses, and those that had ended when the victim was killed."""
    finished: dict[int, Rollout] = {}

    def take(place: int, rollout: Rollout) -> None:
        assert place not in finished
        finished[place] = rollout
        if len(finished) == 3:
            victim.kill()
            early.update(finished)

    early: dict[int, Rollout] = {}
    rollouts = sample_rollouts(own.engine, PROBLEMS, 4, SAMPLING, 3, take)
    assert sorted(finished) == list(range(20))
    assert all(rollouts[place] == rollout for place, rollout in finished.items())
    return rollouts, early


@pytest.mark.parametrize("killed", ["server", "engine core"])
def test_responses_outlive_the_engine(own: Own, killed: str) -> None:
    change_weights(own.agent, seed=own.agent.policy_version)
    before = own.engine.sync().restarts
    undisturbed = sample_rollouts(own.engine, PROBLEMS, 4, SAMPLING, 3)
    server = own.server
    old = with_children(server)
    rollouts, early = generate_and_kill(own, server if killed == "server" else engine_core(server))
    assert own.engine.restarts == before + 1
    assert [r.problem.id for r in rollouts] == [p.id for p in PROBLEMS for _ in range(4)]
    assert len(early) == 3
    assert all(rollouts[place] == rollout for place, rollout in early.items())
    assert {r.policy_version for r in rollouts} == {own.agent.policy_version}
    assert logprob_gap(own.agent, rollouts, SAMPLING) < 1e-4
    # a seed of its own for every response: what was asked again is what would have been said
    assert [r.token_ids for r in rollouts] == [r.token_ids for r in undisturbed]
    assert still_there(old) == []
    (note,) = own.engine.take_notes()
    assert "vLLM server of agent 'tess'" in note
    assert "started again" in note
    assert own.engine.sync().restarts == before + 1


def test_a_server_that_hangs_is_noticed(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    own.engine.sync()
    monkeypatch.setattr(vllm_engine, "MAX_RESTARTS", 0)
    engine = own.beside(engine_agent("other", tied=True))
    engine.sync()
    for name, value in (("HEALTH_EVERY", 0.2), ("HEALTH_MISSES", 2), ("ANSWER_SECONDS", 1.0)):
        monkeypatch.setattr(client, name, value)
    stopped = with_children(own.server)
    try:
        for process in stopped:
            process.suspend()
        with pytest.raises(EngineError, match=r"'tess' no longer answers.*0 restarts"):
            sample_rollouts(engine, PROBLEMS, 1, SAMPLING, 0)
    finally:
        for process in stopped:
            process.resume()


def test_a_dead_engine_is_said_to_be_dead_where_it_may_not_be_restarted(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "MAX_RESTARTS", 0)
    own.engine.sync()
    agent = engine_agent("other", tied=True)
    asked, taught = own.beside(agent), own.beside(agent, weight_sync="gloo")
    asked.sync()
    taught.sync()
    for process in with_children(own.server):
        process.kill()
    message = r"server of agent 'tess' .*died 1 times.*0 restarts in a row are allowed"
    with pytest.raises(EngineError, match=message):
        sample_rollouts(asked, PROBLEMS, 1, SAMPLING, 0)
    change_weights(agent, seed=0)
    with pytest.raises(EngineError, match=message):  # not what the broken connection for weights says
        taught.sync()


KILLED = """
import sys
from pathlib import Path
from hacrl.config.schema import VllmSettings
from hacrl.engines.vllm.launch import make_vllm_engine
from tests.support.engines import CONTEXT, engine_agent, probe_prompts

settings = VllmSettings(python=sys.argv[1], engine_args={"kv_cache_memory_bytes": 107_374_182})
make_vllm_engine(engine_agent(), settings, probe_prompts(engine_agent()), CONTEXT, Path(sys.argv[2])).sync()
"""


def test_a_server_does_not_outlive_hacrl(vllm_python: str, tmp_path: Path) -> None:
    """Killed while its server loads, which is when vLLM itself does not heed signals."""
    command = [sys.executable, "-c", KILLED, vllm_python, str(tmp_path)]
    root = Path(__file__).parents[2]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    hacrl = subprocess.Popen(command, env=here)

    def has_children() -> bool:
        return any(
            "EngineCore" in " ".join(p.cmdline()) for s in servers_of(tmp_path) for p in with_children(s)
        )

    wait_until(has_children, lambda: hacrl.poll() is None, tmp_path / "server.log")
    (server,) = servers_of(tmp_path, hacrl.pid)
    started = with_children(server)
    hacrl.send_signal(signal.SIGKILL)
    hacrl.wait()
    assert still_there(started) == []


def test_a_server_that_cannot_start_says_why(vllm_python: str, tmp_path: Path) -> None:
    settings = VllmSettings(python=vllm_python, engine_args={"no_such_option": 1})
    engine = make_vllm_engine(engine_agent("eve"), settings, probe_prompts(engine_agent()), CONTEXT, tmp_path)
    with pytest.raises(EngineError) as caught:
        engine.sync()
    assert "vLLM server of agent 'eve' does not start (exit code 2)" in str(caught.value)
    assert "unrecognized arguments: --no-such-option" in str(caught.value)
    assert str(tmp_path / "server.log") in str(caught.value)
    assert servers_of(tmp_path) == []
