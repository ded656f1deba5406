"""Weights get into an engine by every way a CPU has, and an engine that did not get them is found out."""

from __future__ import annotations

import re

import pytest
import torch

from hacrl.config.schema import AgentSettings, LoraSettings
from hacrl.engines.sync_check import EngineError
from hacrl.engines.vllm import engine as vllm_engine
from hacrl.engines.vllm.weight_transfer import Broadcast, Files, Transport, exported_weights
from hacrl.models.agent import Agent
from hacrl.models.lora import add_adapters
from hacrl.types import Sampling
from tests.support.engines import (
    PROBLEMS,
    change_weights,
    engine_agent,
    logprob_gap,
    mean_gap,
    sample_rollouts,
)
from tests.vllm.conftest import Server

pytestmark = pytest.mark.vllm
SAMPLING = Sampling(12, temperature=0.9)


def adapted_agent() -> Agent:
    """With adapters on every linear layer, which start without effect."""
    plain = engine_agent("lora")
    settings = AgentSettings(name="lora", model="-", lora=LoraSettings(rank=4, alpha=16.0))
    model = add_adapters(plain.model, settings, seed=0)
    return Agent("lora", model, plain.tokenizer)


@pytest.mark.parametrize("way", ["files", "gloo"])
def test_large_updates_arrive(server: Server, way: str) -> None:
    agent = engine_agent()
    engine = server.engine(agent, weight_sync=way)
    before = sample_rollouts(engine, PROBLEMS, 4, SAMPLING, seed=0)
    assert logprob_gap(agent, before, SAMPLING) < 1e-4
    for version in (1, 2, 3):
        change_weights(agent, seed=version)
        report = engine.sync()
        assert (report.policy_version, report.weight_sync, report.restarts) == (version, way, 0)
        after = sample_rollouts(engine, PROBLEMS, 4, SAMPLING, seed=0)
        assert logprob_gap(agent, after, SAMPLING) < 1e-4
        assert mean_gap(agent, before, SAMPLING) > 0.3


def test_the_worker_has_our_transfer_engine(server: Server) -> None:
    """Else the test above would show nothing of vLLM's weight-transfer API."""
    engine = server.engine(engine_agent())
    assert [worker["weight_transfer"] for worker in engine.describe()] == [True]


@pytest.mark.parametrize(
    "transport",
    [Files(has_api=False), Broadcast("gloo", 1, "127.0.0.1", has_api=False)],
    ids=["files", "gloo"],
)
def test_the_worker_extension_loads_weights_where_vllm_has_no_api(
    server: Server, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    agent = engine_agent(seed=7)
    monkeypatch.setattr(vllm_engine, "make_transport", lambda *_: transport)
    engine = server.engine(agent)
    for version in (1, 2):
        change_weights(agent, seed=version)
        assert engine.sync().logprob_gap < 1e-4


def test_weights_that_are_missing_are_named(server: Server) -> None:
    """The next update is whole again."""
    agent = engine_agent(seed=8)
    engine = server.engine(agent)
    engine.sync()
    missing = "model.layers.1.mlp.down_proj.weight"
    some = [(name, tensor) for name, tensor in exported_weights(agent.model) if name != missing]
    with pytest.raises(EngineError, match=f"the agent has no weights for {missing}"):
        Files(has_api=True).send(some, engine.backend)
    change_weights(agent, seed=1)
    assert engine.sync().logprob_gap < 1e-4


def test_adapters_are_merged_on_the_way(server: Server) -> None:
    agent = adapted_agent()
    engine = server.engine(agent)
    assert engine.sync().logprob_gap < 1e-5
    before = sample_rollouts(engine, PROBLEMS, 4, SAMPLING, seed=0)
    generator = torch.Generator().manual_seed(1)
    trained = [parameter for parameter in agent.model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven layers in two blocks
    for version in (1, 2):
        with torch.no_grad():
            for parameter in trained:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        agent.policy_version = version
        assert engine.sync().logprob_gap < 1e-4
        after = sample_rollouts(engine, PROBLEMS, 4, SAMPLING, seed=0)
        assert logprob_gap(agent, after, SAMPLING) < 1e-4
        assert mean_gap(agent, before, SAMPLING) > 0.3


class Silent(Files):
    """Says that all went well."""

    def send(self, weights, backend) -> None:
        """Sends nothing."""


def test_an_update_that_does_not_arrive_is_noticed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = engine_agent()
    server.engine(agent).sync()  # now the server has the agent's weights
    monkeypatch.setattr(vllm_engine, "make_transport", lambda *_: Silent())
    engine = server.engine(agent)
    assert engine.sync().logprob_gap < 1e-5  # nothing had to be sent
    change_weights(agent, seed=1)
    with pytest.raises(EngineError) as caught:
        engine.sync()
    found = re.search(r"policy version 1\).* differ by ([\d.]+) nats per token", str(caught.value))
    assert found, caught.value
    assert float(found[1]) > 0.3
    assert "agents.ada.vllm.max_logprob_gap" in str(caught.value)
    with pytest.raises(EngineError, match="not at the agent's policy"):  # nor does it generate
        sample_rollouts(engine, PROBLEMS, 1, SAMPLING, seed=0)


@pytest.mark.parametrize(("size", "gap", "passes"), [(1e-4, 0.05, True), (0.2, 1e-3, False)])
def test_the_user_sets_the_allowed_gap(
    server: Server, monkeypatch: pytest.MonkeyPatch, size: float, gap: float, passes: bool
) -> None:
    agent = engine_agent()
    server.engine(agent).sync()
    monkeypatch.setattr(vllm_engine, "make_transport", lambda *_: Silent())
    engine = server.engine(agent, max_logprob_gap=gap)
    change_weights(agent, seed=1, size=size)
    if passes:
        assert 1e-6 < engine.sync().logprob_gap < gap
        return
    with pytest.raises(EngineError, match=re.escape(f"allowed are {gap:g}")):
        engine.sync()


@pytest.mark.parametrize(
    ("way", "needs"),
    [("ipc", "learner and engine on the same GPU"), ("nccl", "learner and engine on GPUs")],
)
def test_a_transport_that_needs_a_gpu_is_refused_without_one(server: Server, way: str, needs: str) -> None:
    engine = server.engine(engine_agent(), weight_sync=way)
    message = f"weight_sync={way} needs {needs}; here the learner is on cpu and the engine on cpu"
    with pytest.raises(EngineError, match=message):
        engine.sync()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: engine_agent(pairs=True), "vocab_size 22 instead of 122"),
        (lambda: engine_agent(tied=True), "tie_word_embeddings False instead of True"),
    ],
)
def test_a_server_of_another_model_is_refused(server: Server, other, difference: str) -> None:
    engine = server.engine(other())
    with pytest.raises(EngineError, match=f"serves another model than agent 'ada': {difference}"):
        engine.sync()
