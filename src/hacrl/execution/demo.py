"""The demo: the same bundled agents once together with HACPO and once each alone with GSPO."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

from hacrl.config.loading import build_config
from hacrl.config.schema import RunConfig
from hacrl.config.yaml_loader import parse_yaml
from hacrl.execution.local import RunResult, run_locally
from hacrl.learning.observer import Observer

METHOD_LABELS = {"gspo": "GSPO, alone", "hacpo": "HACPO, together"}

# Opens a progress display for one run.
WatchRun = Callable[[RunConfig], AbstractContextManager[Observer]]


def demo_config(method: str, output: Path, seed: int = 0, steps: int | None = None) -> RunConfig:
    """The demo's recipe under one method; both methods clip own responses alike."""
    data: dict[str, Any] = parse_yaml(
        files("hacrl.config").joinpath("demo.yaml").read_text("utf-8"), "demo.yaml"
    )
    recipe = data["method"]
    if method != recipe["name"]:
        data["method"] = {"name": method, "clip_low": recipe["clip_low"], "clip_high": recipe["clip_high"]}
    data |= {"output": str(output / method), "seed": seed}
    if steps is not None:
        data["steps"] = steps
    return build_config(data, "demo.yaml")


def run_demo_methods(output: Path, seed: int, steps: int | None, watch: WatchRun) -> dict[str, RunResult]:
    """Train under each method; equal seeds, so both are asked the same problems."""
    results = {}
    for method in METHOD_LABELS:
        config = demo_config(method, output, seed, steps)
        with watch(config) as progress:
            results[method] = run_locally(config, [progress])
    return results
