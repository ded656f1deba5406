"""Asynchronous against synchronous: time a step, and accuracy after equally many rollouts.

    python benchmarks/asynchronous.py --recipe model --seeds 5 --folder runs/asynchronous

Both train the same agents on the same problems with the same number of rollouts and updates. They differ in
``asynchronous.max_staleness`` and in the copies that an asynchronous run samples with. Runs of one seed
follow each other, so that a machine that slows down slows down both. Finished runs are read, not made again.

``--wait SECONDS``: every generation and every learning step takes at least so long, most of which it sleeps,
as if each engine and each learner had a device of its own. Then times say what overlap gains.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from hacrl.config.load import apply_override, build_config, read_recipe
from hacrl.engines.hf.detached import DetachedEngine
from hacrl.runs.results import read_finished
from hacrl.runs.run import run_locally
from hacrl.training.learner import Learner


def main() -> int:
    """Make all runs, and print one line for each value of max_staleness."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="model", help="a recipe's name or file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], help="values of max_staleness")
    parser.add_argument("--folder", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--wait", type=float, default=0.0, help="seconds")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    lengthen(DetachedEngine, "generate", arguments.wait)
    lengthen(Learner, "learn", arguments.wait)
    found: dict[int, list[dict[str, Any]]] = {staleness: [] for staleness in arguments.staleness}
    for seed in range(arguments.seeds):
        for staleness in arguments.staleness:
            found[staleness].append(measure(arguments, staleness, seed))
            print(json.dumps(found[staleness][-1]), flush=True)
    for staleness, runs in found.items():
        print(summary(staleness, runs))
    return 0


def lengthen(kind: type, name: str, seconds: float) -> None:
    """Make a method take at least so long."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def longer(*positional: Any, **named: Any) -> Any:
        end = time.monotonic() + seconds
        result = method(*positional, **named)
        time.sleep(max(0.0, end - time.monotonic()))
        return result

    if seconds:
        setattr(kind, name, longer)


def measure(arguments: argparse.Namespace, staleness: int, seed: int) -> dict[str, Any]:
    """Make one run, unless it is there; return its numbers."""
    folder = arguments.folder / f"staleness-{staleness}-seed-{seed}"
    data = read_recipe(Path(arguments.recipe))
    data |= {
        "output": str(folder),
        "seed": seed,
        "asynchronous": {"max_staleness": staleness},
        "checkpoint": {"every": 0},
        "keep_rollouts": "none",
    }
    if staleness or arguments.wait:
        data["agent_defaults"] = {**data.get("agent_defaults", {}), "replicas": {"count": 1}}
    for override in arguments.overrides:
        apply_override(data, override)
    config = build_config(data, arguments.recipe)
    names = [agent.name for agent in config.agents]
    status = folder / "status.json"
    if not status.exists() or json.loads(status.read_text())["state"] != "finished":
        run_locally(config, overwrite=True)
    result = read_finished(folder, config.steps, names)
    seconds = [json.loads(line)["whole"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    steps = [json.loads(line)["agents"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = result.accuracies[config.steps]
    return {
        "staleness": staleness,
        "seed": seed,
        "seconds": statistics.median(seconds[1:]),
        "rollouts": sum(result.rollouts.values()),
        "accuracy": {name: round(last[name].mean, 4) for name in names},
        "before": {name: round(result.accuracies[0][name].mean, 4) for name in names},
        "steps_mean": round(statistics.mean(own_staleness(steps)), 3),
    }


def own_staleness(steps: list[dict[str, Any]]) -> list[float]:
    """Return the mean staleness of every learner's own tokens in every step."""
    return [
        report["asynchronous"]["staleness"][name]["steps_mean"] if "asynchronous" in report else 0.0
        for agents in steps
        for name, report in agents.items()
    ]


def summary(staleness: int, runs: list[dict[str, Any]]) -> str:
    """Return one line: medians over seeds of times, means and spread of accuracies."""
    seconds = [run["seconds"] for run in runs]
    parts = [
        f"max_staleness {staleness}: {statistics.median(seconds):.2f} s a step "
        f"({min(seconds):.2f} to {max(seconds):.2f})",
        f"own tokens {statistics.mean(run['steps_mean'] for run in runs):.2f} steps old",
    ]
    for name in runs[0]["accuracy"]:
        values = [run["accuracy"][name] for run in runs]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        before = statistics.mean(run["before"][name] for run in runs)
        parts.append(f"{name} {before:.3f} -> {statistics.mean(values):.3f} +- {spread:.3f}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
