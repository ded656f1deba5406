"""Several replicas sample what one engine would, take weights in the middle of it, and may be lost."""

from __future__ import annotations

import copy
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.base import GenerationRequest, Sample
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.replicas.connection import connect, greeted
from hacrl.engines.replicas.engine import ReplicaEngine
from hacrl.engines.sync_check import EngineError
from hacrl.models.agent import Agent
from hacrl.models.lora import add_adapters
from hacrl.seeding import derive_seed
from hacrl.types import Sampling
from tests.support.engines import change_weights, engine_agent, probe_prompts
from tests.support.live_updates import cached_logprobs
from tests.support.replicas import replica_engine

SAMPLING = Sampling(24, temperature=0.9)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaEngine]:
    """Two replicas. Tests may lose one of them: the next weight sync starts it again."""
    made = replica_engine(engine_agent(leaning={"<eos>": 0.5}), tmp_path_factory.mktemp("replicas"))
    yield made
    made.close()


def request_of(agent: Any, sampling: Sampling = SAMPLING, samples: int = 4) -> GenerationRequest:
    prompts = probe_prompts(agent)
    return GenerationRequest(prompts, samples, sampling, frozenset(agent.stop_ids), seed=3)


def expected_samples(agent: Any, request: GenerationRequest) -> list[Sample]:
    """What one engine in this process samples with the same seeds."""
    seeds = tuple(derive_seed(request.seed, index) for index in range(request.num_samples))
    return TransformersEngine(agent).generate(replace(request, response_seeds=seeds))


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def process_of(engine: ReplicaEngine, number: int) -> int:
    child: Any = engine._fleet._replicas[number].process
    return int(child._process.pid)


def test_replicas_sample_what_one_engine_samples(engine: ReplicaEngine) -> None:
    agent = engine.policy
    for version in (1, 2):
        change_weights(agent, seed=version, size=0.02)  # type: ignore[arg-type]
        request = request_of(agent)
        assert_same(engine.generate(request), expected_samples(agent, request))
    one_prompt = replace(request, prompts=request.prompts[1:2], samples_per_prompt=7)
    assert_same(engine.generate(one_prompt), expected_samples(agent, one_prompt))  # 4 and 3 of its responses
    assert [len(set(map(id, engine._fleet.replicas)))] == [2]


def test_weights_change_in_the_middle_of_responses(engine: ReplicaEngine) -> None:
    agent: Any = engine.policy
    engine.follows_policy = False
    try:
        engine.sync()
        models = {agent.policy_version: copy.deepcopy(agent.model)}
        old = agent.policy_version
        request = request_of(agent, Sampling(400, temperature=0.9), samples=2)
        request = replace(request, stop_ids=frozenset({-1}))
        found: list[list[Sample]] = []
        thread = threading.Thread(target=lambda: found.append(engine.generate(request)))
        steps = {id(replica): ping(replica) for replica in engine._fleet.replicas}
        thread.start()
        for replica in engine._fleet.replicas:
            while ping(replica) < steps[id(replica)] + 5:  # both are in the middle of it
                assert thread.is_alive()
        change_weights(agent, seed=77, size=0.05)
        models[old + 1] = copy.deepcopy(agent.model)
        report = engine.sync()
        thread.join(120)
        (samples,) = found
    finally:
        engine.follows_policy = True
    assert (report.policy_version, report.weight_sync) == (old + 1, "gloo")
    assert report.logprob_gap < 1e-5
    for number, sample in enumerate(samples):
        assert [version for version, _ in sample.versions] == [old, old + 1]
        assert sum(tokens for _, tokens in sample.versions) == 400
        expected = cached_logprobs(models, request.prompts[number // 2], sample, request.sampling)
        assert sample.logprobs == pytest.approx(expected, abs=2e-4)
    switches = {sample.versions[0][1] for sample in samples}
    assert 1 <= len(switches) <= 2  # one per replica, whose responses are decoded in step


def ping(replica: Any) -> int:
    return int(replica.ask({"do": "ping"}).result(60)["steps"])


def test_the_others_sample_what_a_killed_replica_leaves(engine: ReplicaEngine) -> None:
    agent: Any = engine.policy
    engine.sync()
    before = engine._fleet.restarts
    request = request_of(agent, Sampling(200, temperature=0.9))
    expected = expected_samples(agent, request)
    victim, steps = engine._fleet.replicas[1], ping(engine._fleet.replicas[1])

    def kill() -> None:
        while ping(victim) < steps + 3:
            pass
        os.kill(process_of(engine, 1), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    found = engine.generate(request)
    thread.join(60)
    assert_same(found, expected)
    (note,) = engine.take_notes()
    assert note.startswith("replica 1 of agent 'ada' is lost: its process is gone (exit code -9); its log")
    assert note.endswith("The others sample its prompts until the next weight sync starts it again")
    assert len(engine._fleet.replicas) == 1
    assert_same(engine.generate(request), expected)  # with one replica
    change_weights(agent, seed=5, size=0.02)
    report = engine.sync()
    assert report.restarts == before + 1
    assert len(engine._fleet.replicas) == 2
    assert_same(engine.generate(request), expected_samples(agent, request))


def test_a_replica_that_dies_before_a_weight_sync_is_started_again(engine: ReplicaEngine) -> None:
    agent: Any = engine.policy
    engine.sync()
    before = engine._fleet.restarts
    os.kill(process_of(engine, 0), signal.SIGKILL)
    change_weights(agent, seed=6, size=0.02)
    assert engine.sync().restarts == before + 1
    request = request_of(agent)
    assert_same(engine.generate(request), expected_samples(agent, request))
    assert "replica 0 of agent 'ada' is lost" in "".join(engine.take_notes())


def test_a_silent_replica_is_given_up(engine: ReplicaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = engine.policy
    engine.sync()
    request = request_of(agent)
    expected = expected_samples(agent, request)
    monkeypatch.setattr(engine._fleet, "settings", replace(engine._fleet.settings, timeout=20.0))
    stopped = process_of(engine, 1)
    os.kill(stopped, signal.SIGSTOP)
    assert_same(engine.generate(request), expected)
    (note,) = engine.take_notes()
    assert "replica 1 of agent 'ada' is lost: it has sampled no token for 20 s (replicas.timeout)" in note
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, 0)


def test_a_caller_that_stops_leaves_the_replicas_usable(engine: ReplicaEngine) -> None:
    agent: Any = engine.policy
    engine.sync()

    def fail(_: Any) -> None:
        raise KeyError("stop")

    with pytest.raises(KeyError):
        engine.generate(request_of(agent, samples=2), fail)
    request = request_of(agent)
    assert_same(engine.generate(request), expected_samples(agent, request))


def test_weights_that_are_not_finite_are_refused_by_name(engine: ReplicaEngine) -> None:
    agent: Any = engine.policy
    engine.sync()
    kept = copy.deepcopy(agent.model.state_dict())
    with torch.no_grad():
        agent.model.lm_head.weight.fill_(float("nan"))
    agent.policy_version += 1
    with pytest.raises(EngineError, match=r"replica 0 of agent 'ada' failed at 'prove': .* not finite"):
        engine.sync()
    agent.model.load_state_dict(kept)
    request = request_of(agent)
    assert_same(engine.generate(request), expected_samples(agent, request))


def test_adapters(tmp_path: Path) -> None:
    lora = LoraSettings(rank=4, alpha=12.0)
    plain = engine_agent()
    model = add_adapters(plain.model, AgentSettings(name="ada", model="-", lora=lora), seed=5)
    agent = Agent("ada", model, plain.tokenizer)
    engine = replica_engine(agent, tmp_path, count=1, lora=lora)
    try:
        request = request_of(agent)
        before = engine.generate(request)
        assert_same(before, expected_samples(agent, request))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name:
                    weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        agent.policy_version = 1
        after = engine.generate(request)
        assert_same(after, expected_samples(agent, request))
        assert [sample.token_ids for sample in after] != [sample.token_ids for sample in before]
    finally:
        engine.close()


def test_a_replica_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    engine = replica_engine(engine_agent(), tmp_path, count=1)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(
        EngineError,
        match=r"replica 0 of agent 'ada' does not start: its process is gone \(exit code 1\)[\s\S]*model_t",
    ):
        engine.sync()
    engine.close()


def test_a_stranger_is_hung_up_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for token, expected in (("wrong", None), ("right", 1)):
            theirs = connect("127.0.0.1", port, token, 1, 10.0)
            found = greeted(listener.accept()[0], "right", 10.0)
            assert (None if found is None else found[0]) == expected
            if found is None:
                assert theirs.receive() is None
            else:
                found[1].close()
            theirs.close()
