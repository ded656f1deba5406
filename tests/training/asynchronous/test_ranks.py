"""Asynchronous agents with several ranks: all ranks make the same calls, whatever engines do meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hacrl.config.schema import FsdpSettings, RunConfig
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from tests.training.asynchronous.orders import Order, asynchronous, finish, lines, oldest_first
from tests.training.asynchronous.test_runs import AGENTS, check_all_learnt_once, check_staleness
from tests.training.runs import Runs


def with_ranks(config: RunConfig, ranks: dict[str, int]) -> RunConfig:
    agents = tuple(
        replace(agent, ranks=ranks.get(agent.name, 1), fsdp=FsdpSettings(timeout=60.0))
        for agent in config.agents
    )
    return replace(config, agents=agents)


def weights(config: RunConfig, agent: str) -> dict[str, torch.Tensor]:
    return load_file(Path(config.output) / "agents" / agent / "model.safetensors")


def test_two_ranks_learn_what_one_learns_in_the_same_order(runs: Runs) -> None:
    """The jobs run one after the other, so that both runs sample the same batches with the same weights."""
    options = {"steps": 3, "evaluation": {"problems": 3}, "learning": {"old_policy": "sampler"}}
    alone = asynchronous(runs, *AGENTS, **options)
    two = with_ranks(asynchronous(runs, *AGENTS, **options), {"char": 2})
    orders = [Order(oldest_first), Order(oldest_first)]
    for config, order in zip((alone, two), orders, strict=True):
        finish(config, order)
    assert orders[0].ran == orders[1].ran
    assert max(check_staleness(two)) == 1
    for expected, found in zip(
        lines(alone.output, "metrics.jsonl"), lines(two.output, "metrics.jsonl"), strict=True
    ):
        one, other = expected["agents"]["char"], found["agents"]["char"]
        assert other["asynchronous"] == one["asynchronous"]
        for number in ("verdicts", "reward", "tokens"):  # the same responses
            assert other["rollout"][number] == one["rollout"][number]
        for number in ("loss", "grad_norm"):
            assert other["learning"][number] == pytest.approx(one["learning"][number], abs=1e-4)
        assert other["engine"]["logprob_gap"] < 1e-5
    for name in AGENTS:
        for key, value in weights(alone, name).items():
            assert torch.allclose(weights(two, name)[key], value, atol=1e-4), (name, key)


def test_two_agents_with_ranks_sample_and_learn_at_once(runs: Runs) -> None:
    """Both are led by this process, in threads. One of them goes on with one rank."""
    config = with_ranks(asynchronous(runs, *AGENTS, steps=2, every=2), {"char": 2, "pair": 2})
    with LocalRun(config) as run:
        run.train()
    check_all_learnt_once(config)
    check_staleness(config)
    more = inspect_run(Path(config.output), ["steps=4", "agents.char.ranks=1"])
    with LocalRun(more.config, resumed=more.point) as run:
        run.train()
        run.save()
    finished = replace(config, steps=4)
    check_all_learnt_once(finished)
    check_staleness(finished)
