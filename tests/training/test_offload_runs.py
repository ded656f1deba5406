"""Whole runs with offloading write the same files, to the bit, as without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from hacrl.config.schema import OffloadLevel, RunConfig
from hacrl.executors import workers
from hacrl.memory.decision import MemoryDecision
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files
from tests.support.late_transfers import LateTransfers


class Watch(Observer):
    """Records the offloaded bytes at an agent's last response, by phase and agent."""

    def __init__(self) -> None:
        self.away: dict[tuple[Phase, str], int] = {}
        self._move = LateTransfers(torch.device("cpu"))
        self._phase: Phase = "evaluate"

    def make_transfers(self, device: torch.device) -> LateTransfers:
        self._move = LateTransfers(device)
        return self._move

    @property
    def away_now(self) -> int:
        return self._move.away

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        self._phase = phase

    def on_response(self, agent: str) -> None:
        self.away[self._phase, agent] = self._move.away


def force(monkeypatch: pytest.MonkeyPatch, level: OffloadLevel, watch: Watch) -> None:
    """Force an offload level on the CPU, with transfers that need no GPU."""

    def decide(config: RunConfig, _checked: object, agents: Sequence[Agent]) -> MemoryDecision:
        names = [agent.name for agent in agents]
        return MemoryDecision(dict.fromkeys(names, level), dict.fromkeys(names, 4096), config)

    monkeypatch.setattr(workers, "decide_memory", decide)
    monkeypatch.setattr(workers, "Residency", partial(Residency, make_transfers=watch.make_transfers))


KINDS = {
    "float32": {},
    "bfloat16": {"agent_defaults": {"precision": "bfloat16"}},
    "lora": {"agent_defaults": {"lora": {"rank": 2}}},
    "reference": {"method": {"name": "gspo", "kl_coefficient": 0.1}},
}


def train_until_one_has_learnt(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave off in the middle of the step."""
    prepare, taught = run.trainer.executor.residency.prepare_learning, []

    def then_interrupt(name: str) -> None:
        prepare(name)
        taught.append(name)
        run.interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(run.trainer.executor.residency, "prepare_learning", then_interrupt)
        run.train()
    assert len(taught) == 1


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("float32", "stream"),
        ("bfloat16", "optimizer"),
        ("bfloat16", "stream"),
        ("bfloat16", "weights"),
        ("bfloat16", "all"),
        ("lora", "weights"),
        ("reference", "stream"),
    ],
)
def test_a_run_is_the_same_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, level: OffloadLevel
) -> None:
    """With checkpoints, an interruption within a step, and a resume into offloaded optimizers."""
    monkeypatch.setattr("hacrl.training.optimizer_block.BLOCK_BYTES", 3000)  # many blocks
    monkeypatch.setattr(
        "hacrl.training.gradients.MIN_OFFLOAD_BYTES", 100
    )  # bytes, so that small sums are offloaded too
    plain, parts = (chaos_config(tmp_path / name, 2, **KINDS[kind]) for name in ("plain", "parts"))
    run_locally(plain)
    watch = Watch()
    force(monkeypatch, level, watch)
    with LocalRun(parts, [watch]) as run:
        train_until_one_has_learnt(run, monkeypatch)
        run.save()
    found = inspect_run(tmp_path / "parts")
    with LocalRun(found.config, [watch], resumed=found.point) as run:
        run.train()
        run.save()
    assert differing_files(tmp_path / "plain", tmp_path / "parts") == []
    weights_of, moved = {}, 0
    for participant in run.trainer.executor.workers.values():  # after the run they are whole, and at home
        parameters = list(participant.agent.model.parameters())
        assert all(parameter.isfinite().all() for parameter in parameters)
        weights_of[participant.name] = sum(parameter.nbytes for parameter in parameters)
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        moved += trained * (12 if kind == "bfloat16" else 8)  # moments, and masters that are not parameters
    if level == "all":
        return  # gradient sums are offloaded as well
    for name in weights_of:
        others = sum(weights_of.values()) - weights_of[name] if level == "weights" else 0
        assert watch.away["rollout", name] == watch.away["evaluate", name] == moved + others
    assert watch.away_now == moved  # no weights
