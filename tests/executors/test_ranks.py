"""A run whose agent has two ranks: this process and another one on the same machine."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config.schema import AgentSettings, FsdpSettings, RunConfig
from hacrl.errors import ConfigError, TrainingError
from hacrl.models.agent import Agent
from hacrl.runs.preflight import check_agents
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from tests.support.chaos import chaos_config

TIMEOUT = 10.0  # seconds that a rank waits for another one


def config(folder: Path, ranks: int, steps: int = 2, **changes: Any) -> RunConfig:
    """Two agents, the first with ranks; the old policy is the sampler's however an agent samples."""
    base = chaos_config(folder, steps)
    first = replace(base.agents[0], ranks=ranks, fsdp=FsdpSettings(timeout=TIMEOUT))
    learning = replace(base.learning, old_policy="sampler")
    return replace(base, agents=(first, *base.agents[1:]), learning=learning, threads=1, **changes)


def metrics(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[step])["agents"]


def test_a_run_with_two_ranks_is_the_run_with_one_and_ends_with_its_rank(tmp_path: Path) -> None:
    alone, two = config(tmp_path / "alone", 1), config(tmp_path / "two", 2)
    big = two.agents[0].name
    run_locally(alone)
    with LocalRun(two) as run:
        run.train()
        run.save()
        for step in (0, 1):
            expected, found = metrics(tmp_path / "alone", step)[big], metrics(tmp_path / "two", step)[big]
            for number, value in expected["rollout"].items():  # the same responses, from equal weights
                close = isinstance(value, float)
                assert found["rollout"][number] == (pytest.approx(value, abs=1e-4) if close else value)
            for number in ("loss", "grad_norm"):
                assert found["learning"][number] == pytest.approx(expected["learning"][number], abs=1e-4)
            assert found["engine"]["weight_sync"] == "gathered"
            assert found["engine"]["logprob_gap"] < 1e-5
        saved = [
            Agent.load(AgentSettings(name=big, model=str(tmp_path / which / "agents" / big)), "cpu").model
            for which in ("alone", "two")
        ]
        for one, other in zip(*(model.parameters() for model in saved), strict=True):
            assert torch.allclose(one, other, atol=1e-4)

        # a rank that is stopped does not answer: the run ends in time, with a sentence
        (process,) = run.trainer.executor._ranks._processes.values()
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TrainingError, match=f"agent '{big}': rank 0 of 2 cannot go on: another rank did"):
            run.trainer.step(3)
        assert time.monotonic() - started < 12 * TIMEOUT
        os.kill(process.pid, signal.SIGKILL)
    assert process.pid is None
    with pytest.raises(TrainingError, match="cannot go on"):
        run.trainer.executor.workers[big].tensors()

    # the checkpoint of two ranks goes on in one process
    found = inspect_run(tmp_path / "two", ["steps=3", f"agents.{big}.ranks=1"])
    assert any("ranks changed" in note for note in found.point.notes)
    with LocalRun(found.config, resumed=found.point) as resumed:
        resumed.train()
    assert metrics(tmp_path / "two", 2)[big]["learning"]["updates"] > 0


def agents(*settings: AgentSettings, **changes: Any) -> RunConfig:
    return RunConfig(agents=settings, output="unused", **changes)


BIG = AgentSettings(name="big", model="bundled:qwen-large", ranks=2)


def test_settings_that_no_rank_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"agents.big.ranks=2: every rank loads its share of the model"):
        check_agents(agents(BIG), {"big"})
    compiled = replace(agents(BIG).learning, compile=True)
    with pytest.raises(ConfigError, match="layers of an agent with several ranks are not compiled"):
        check_agents(agents(BIG, learning=compiled), ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    placed = replace(BIG, device="cuda:1")
    assert check_agents(agents(placed), ()) == {"big": "cuda:1"}
    with pytest.raises(ConfigError, match=r"agents.big.ranks: there is no 'cuda:3'"):
        check_agents(agents(replace(placed, ranks=3)), ())
    other = AgentSettings(name="small", model="bundled:qwen-direct", device="cuda:2")
    with pytest.raises(ConfigError, match="takes cuda:1 to cuda:2, and agent 'small' is on cuda:2 too"):
        check_agents(agents(placed, other), ())


def test_an_executor_that_places_no_ranks_says_so(tmp_path: Path) -> None:
    elsewhere = "tests.support.executors:unranked"
    with pytest.raises(ConfigError, match=r"agents.*ranks=2: executor .* gives every agent one rank"):
        run_locally(config(tmp_path / "run", 2, executor=elsewhere))
