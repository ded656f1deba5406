"""Every example runs unchanged, as a script without a guard, and writes a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.runs.results import read_result

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_python_api(tmp_path):
    out = run_example("python_api", tmp_path, "1", "tensorboard")
    result = read_result(tmp_path / "runs" / "python_api")
    for name, architecture in (("qwen-small-a", "Qwen3ForCausalLM"), ("llama-pairs", "LlamaForCausalLM")):
        before, after = result.accuracies[0][name].mean, result.accuracies[1][name].mean
        assert f"{name} ({architecture}): accuracy {before:.3f} -> {after:.3f}" in out
        assert 0.1 < before < 0.9  # the agents do know some
        assert (result.folder / "agents" / name / "model.safetensors").is_file()
    assert len(list((result.folder / "tensorboard").iterdir())) == 1


def test_custom_task(tmp_path):
    run_example("custom_task", tmp_path, "1")
    [metrics] = (tmp_path / "runs" / "custom_task" / "metrics.jsonl").read_text().splitlines()
    rollouts = {name: agent["rollout"] for name, agent in json.loads(metrics)["agents"].items()}
    assert rollouts.keys() == {"ada", "bob"}
    for report in rollouts.values():
        # 64 responses: 1 for each that is right, 0.25 for some of those that are wrong
        right, wrong = report["verdicts"].get("correct", 0), report["verdicts"].get("wrong", 0)
        assert right > 0
        assert right / 64 <= report["reward"] <= (right + 0.25 * wrong) / 64
        assert report["reward"] * 256 == pytest.approx(round(report["reward"] * 256))


def test_callbacks(tmp_path):
    """With a target below what they start with, the first evaluation after a step ends the run."""
    out = run_example("callbacks", tmp_path, "0.1")
    assert "stopped after 2 of 40 steps" in out
    assert out.count("after 2 steps the weakest is") == 1
    assert "step 1: llama-pairs from qwen-small-a: clipped" in out
    assert sorted(path.name for path in (tmp_path / "runs" / "callbacks" / "agents").iterdir()) == [
        "llama-pairs",
        "qwen-small-a",
    ]
