"""Kill processes of agents under Ray at random phases, and compare the run with an undisturbed local one.

    python scripts/chaos_ray.py [--kills 20] [--steps 10] [--seed 0] [--output FOLDER]

The run itself goes on: every lost agent is rebuilt. Ends with an error unless metrics, rollouts, evaluations
and all agents are the same, byte for byte.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the harness is the tests'
from tests.support.chaos import chaos_config, differing_files
from tests.support.ray_cluster import Killer, Moment, connected

from hacrl.config.schema import CheckpointSettings, RaySettings
from hacrl.runs.run import LocalRun, run_locally


def main() -> None:
    """Run twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.output or Path(tempfile.mkdtemp(prefix="hacrl-chaos-ray-"))
    run_locally(chaos_config(folder / "calm", options.steps))
    config = replace(
        chaos_config(folder / "killed", options.steps),
        executor="ray",
        ray=RaySettings(max_rebuilds=options.kills),
        checkpoint=CheckpointSettings(every=3, background=False),
    )
    killer = Killer(chosen_moments(options.kills, options.steps, options.seed))
    start = time.perf_counter()
    with connected(), LocalRun(config, [killer]) as run:
        killer.run = run
        run.train()
        run.save()
    print(f"{len(killer.killed)} kills in {time.perf_counter() - start:.0f} s: {killer.killed}")
    print(f"seconds until a lost agent was at work again: median {median(killer.seconds):.1f}, "
          f"{min(killer.seconds):.1f} to {max(killer.seconds):.1f}")  # fmt: skip
    differing = differing_files(folder / "calm", folder / "killed")
    print(f"differ: {', '.join(differing)}" if differing else f"all files are the same; runs are in {folder}")
    sys.exit(bool(differing) or bool(killer.waiting))


def chosen_moments(kills: int, steps: int, seed: int) -> list[Moment]:
    """Return different phases of both agents at random, one of them when the agents are saved."""
    every: list[Moment] = [
        (step, phase, agent)
        for step in range(1, steps + 1)
        for phase in ("rollout", "verify", "learn")
        for agent in ("small", "llama")
    ]
    return [*random.Random(seed).sample(every, kills - 1), (steps, "save", "llama")]


if __name__ == "__main__":
    main()
