"""Measure how much memory of ``hacrl train`` a checkpoint takes under ``executor: ray``, and how long.

    python benchmarks/ray_checkpoints.py [--shape qwen3-60m] [--apart]

One agent with random weights makes one step and a checkpoint; then the run is resumed. Prints by how much the
memory of the run's process grew at most. ``--apart``: as if agents shared no disk with the run's process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from shapes import make_agent

from hacrl.config.load import build_config
from hacrl.executors.ray import executor as ray_executor
from hacrl.runs.resume import inspect_run
from hacrl.runs.run import LocalRun
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer

MIB = 2**20


def memory(key: str) -> int:
    """Return a number of this process in bytes: VmHWM is the peak, VmRSS the present size."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


class Peak(Observer):
    """Resets the peak when a step ends, before its checkpoint is written."""

    def __init__(self) -> None:
        self.before = 0
        self.begun = 0.0

    def reset(self) -> None:
        """Forget the peak so far."""
        Path("/proc/self/clear_refs").write_text("5")
        self.before, self.begun = memory("VmRSS"), time.perf_counter()

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Begin to measure."""
        self.reset()

    def say(self, what: str) -> None:
        """Print the growth since the last reset."""
        grown, seconds = memory("VmHWM") - self.before, time.perf_counter() - self.begun
        print(f"{what}: {grown / MIB:,.0f} MiB more at most, {seconds:.1f} s", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-60m")
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    if options.apart:
        ray_executor.share = lambda folder: "a token that is nowhere"
    folder = Path(tempfile.mkdtemp(prefix="hacrl-ray-checkpoints-"))
    config = build_config(
        {
            "agents": [
                {"name": "big", "model": str(make_agent(options.shape, folder / "big", torch.float32, "cpu"))}
            ],
            "output": str(folder / "run"),
            "steps": 1,
            "device": "cpu",
            "threads": 1,
            "executor": "ray",
            "task": {"name": "arithmetic"},
            "method": {"name": "gspo"},
            "rollout": {"prompts_per_step": 1, "rollouts_per_prompt": 2, "max_new_tokens": 4},
            "evaluation": {"problems": 0},
            "checkpoint": {"every": 1, "background": False},
        },
        "benchmark",
    )
    peak = Peak()
    with LocalRun(config, [peak]) as run:
        run.train()
        peak.say("writing")
    files = (folder / "run" / "checkpoints").rglob("*.safetensors")
    print(f"the checkpoint's tensors: {sum(path.stat().st_size for path in files) / MIB:,.0f} MiB")
    found = inspect_run(folder / "run", ["steps=2"])
    peak.reset()
    with LocalRun(found.config, [], resumed=found.point):
        peak.say("placing the agent and reading")


if __name__ == "__main__":
    main()
