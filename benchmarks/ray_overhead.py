"""Measure what ``executor: ray`` costs: the same run under both executors on this machine, in turns.

    python benchmarks/ray_overhead.py [--recipe size] [--steps 12] [--repeats 3] [KEY=VALUE ...]

Prints the median seconds of a step under each executor, without the first step of a run, and the ratio.
Agents that share a process (``place.share``) take turns as under ``executor: local``, so that the ratio shows
the cost of processes and messages. ``--apart`` gives every agent a process of its own: all work at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from hacrl.config.load import load_config
from hacrl.config.schema import PlaceSettings, RunConfig
from hacrl.runs.run import run_locally


def seconds_per_step(config: RunConfig) -> list[float]:
    """Train, and return the seconds of every step but the first."""
    result = run_locally(config)
    lines = (result.folder / "timings.jsonl").read_text().splitlines()
    return [json.loads(line)["whole"] for line in lines][1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="size")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hacrl-ray-overhead-"))
    overrides = [f"steps={options.steps}", "evaluation.problems=0", "checkpoint.every=0", *options.overrides]
    config = load_config(Path(options.recipe), overrides)
    place = PlaceSettings() if options.apart else PlaceSettings(share="all")
    agents = tuple(replace(agent, place=place) for agent in config.agents)
    found: dict[str, list[float]] = {"local": [], "ray": []}
    for repeat in range(options.repeats):
        for executor, seconds in found.items():
            output = str(folder / f"{executor}-{repeat}")
            seconds += seconds_per_step(replace(config, agents=agents, executor=executor, output=output))
    for executor, seconds in found.items():
        print(f"{executor}: {median(seconds):.3f} s a step ({min(seconds):.3f} to {max(seconds):.3f})")
    print(f"ray / local: {median(found['ray']) / median(found['local']):.3f}")


if __name__ == "__main__":
    main()
