"""Seconds that training waits for a checkpoint, written in the background and not; one run each.

    python benchmarks/checkpoints.py --shape qwen3-0.6b --device cuda --only background

Steps between checkpoints are made long enough that a write is over before the next one begins, as it should
be in a real run; only what the run itself waits for is counted. The first checkpoint is reported
separately: it also allocates the memory that later checkpoints are copied to.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from shapes import SHAPES, make_agent, prompts

from hacrl.config.load import build_config
from hacrl.runs.checkpoint import CheckpointId, CheckpointStore
from hacrl.runs.run import LocalRun
from hacrl.tasks.rewards import RewardTask

WAYS = ("background", "inline")
PATIENCE = 600  # seconds for one checkpoint


@dataclass(frozen=True)
class Stalls:
    """Seconds that a run waited for its checkpoints, and the size of one in bytes."""

    first: float
    later: list[float]
    size: int


def meaningless(completions: list[str], **_: object) -> list[float]:
    """A number between 0 and 1 that responses differ in."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


def stalls(folder: Path, model: Path, device: str, background: bool, checkpoints: int) -> Stalls:
    """One run with a checkpoint after each step."""
    config = build_config(
        {
            "agents": [{"name": "agent", "model": str(model)}],
            "output": str(folder),
            "device": device,
            "steps": checkpoints + 1,
            "method": {"name": "gspo"},
            # nothing is compiled: that takes longer than these few steps
            "rollout": {
                "prompts_per_step": 2,
                "rollouts_per_prompt": 4,
                "max_new_tokens": 8,
            },
            "learning": {"compile": False},
            "checkpoint": {"every": 1, "background": background, "keep_last": 1},
        }
    )
    rows = [{"prompt": text} for text in prompts(2 * (checkpoints + 1), 60)]
    with LocalRun(config, task=RewardTask(functions=meaningless, train=rows)) as run:
        after_step, store = run.trainer.after_step, CheckpointStore(folder / "checkpoints")

        def patiently() -> None:
            after_step()
            until = time.monotonic() + PATIENCE
            while CheckpointId(run.trainer.steps_done) not in store.ids() and time.monotonic() < until:
                time.sleep(0.05)

        run.trainer.after_step = patiently
        run.train()
        first, *later = run.checkpoint_stalls
    size = sum(file.stat().st_size for file in (folder / "checkpoints").rglob("*") if file.is_file())
    return Stalls(first, later, size)


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoints", type=int, default=3, help="counted, after one that is not")
    parser.add_argument("--only", choices=WAYS, help="default: one run each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
        model = make_agent(options.shape, Path(folder) / "agent", dtype, options.device)
        for way in [options.only] if options.only else WAYS:
            waited = stalls(
                Path(folder) / way, model, options.device, way == "background", options.checkpoints
            )
            found[way] = {"first": waited.first, "median": statistics.median(waited.later)}
            words = "in the background" if way == "background" else "while training waits"
            each = ", ".join(f"{seconds:.3f}" for seconds in waited.later)
            size = f"{waited.size / 2**30:.2f} GiB"
            print(f"{size} {words}: training waits {each} s; {waited.first:.3f} s the first time", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
