"""The same loop on a GPU. Skipped where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hacrl.config.load import load_config
from hacrl.runs.run import build_trainer, run_locally

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def demo(tmp_path: Path, *overrides: str):
    small = ["steps=4", "evaluation.problems=100", f"output={tmp_path / 'run'}", "device=cuda"]
    return load_config(Path("demo"), [*small, *overrides])


def test_the_demo_learns_on_a_gpu(tmp_path):
    result = run_locally(demo(tmp_path))
    for agent in ("small", "large", "llama"):
        assert result.accuracies[4][agent].mean > result.accuracies[0][agent].mean + 0.05
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        for agent in json.loads(line)["agents"].values():
            assert agent["learning"]["sampler_gap"] < 5e-3  # sampler and learner agree, but for 16 bits


def test_agents_may_live_on_different_devices(tmp_path):
    trainer = build_trainer(demo(tmp_path, "agents.llama.device=cpu"))
    trainer.step(1)
    devices = {
        participant.name: participant.agent.device.type for participant in trainer.executor.workers.values()
    }
    assert devices == {"small": "cuda", "large": "cuda", "llama": "cpu"}
