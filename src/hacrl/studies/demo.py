"""The demo: the same bundled agents, once each alone with GSPO and once together with HACPO."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from hacrl.config.load import build_config, read_recipe
from hacrl.config.schema import RunConfig
from hacrl.runs.results import RunResult
from hacrl.runs.run import run_locally
from hacrl.studies.variants import variant_recipe
from hacrl.training.observer import Observer

METHOD_LABELS = {"gspo": "GSPO, alone", "hacpo": "HACPO, together"}

# Returns a progress display for one run.
WatchRun = Callable[[RunConfig], AbstractContextManager[Observer]]


def demo_config(method: str, output: Path, seed: int = 0, steps: int | None = None) -> RunConfig:
    """Return the config of the demo's recipe under one method."""
    data = variant_recipe(read_recipe(Path("demo")), method)
    data |= {"output": str(output / method), "seed": seed}
    if steps is not None:
        data["steps"] = steps
    return build_config(data, "demo.yaml")


def run_demo_methods(output: Path, seed: int, steps: int | None, watch: WatchRun) -> dict[str, RunResult]:
    """Train under each method with the same seed, so that both see the same problems."""
    results = {}
    for method in METHOD_LABELS:
        config = demo_config(method, output, seed, steps)
        with watch(config) as progress:
            results[method] = run_locally(config, [progress])
    return results
