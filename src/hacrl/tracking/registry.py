"""Trackers by name. A tool is imported only if it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hacrl.config.loading import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.learning.observer import Observer
from hacrl.tracking.base import Backend, TrackedRun, Tracker

# name -> where its class is; the name is also the package's, on PyPI and in Python
BACKENDS: dict[str, str] = {
    "tensorboard": "hacrl.tracking.tensorboard:TensorBoard",
    "wandb": "hacrl.tracking.wandb:Wandb",
    "trackio": "hacrl.tracking.trackio:Trackio",
    "mlflow": "hacrl.tracking.mlflow:Mlflow",
}


def make_trackers(config: RunConfig, folder: Path) -> list[Observer]:
    """A tracker per name; an unknown name or a missing package is refused here, before anything loads."""
    run = tracked_run(config, folder)
    return [Tracker(name, _make_backend(name), run) for name in dict.fromkeys(config.trackers)]


def tracked_run(config: RunConfig, folder: Path) -> TrackedRun:
    """What trackers are told of a run."""
    return TrackedRun(
        folder=folder,
        project=config.project,
        name=config.run_name or folder.resolve().name,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        config_yaml=config_to_yaml(config),
        agents=tuple(agent.name for agent in config.agents),
        logged_rollouts=config.logged_rollouts,
    )


def _make_backend(name: str) -> Backend:
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BACKENDS)}"
        raise ConfigError(f"trackers: there is no tracker {name!r}; {hint}")
    if find_spec(name) is None:
        raise ConfigError(
            f"trackers: {name} needs the package {name!r}, which is not installed; "
            f"pip install 'hacrl[{name}]' (or pip install {name}), or leave it out of trackers"
        )
    module, _, attribute = BACKENDS[name].partition(":")
    make: Callable[[], Backend] = getattr(import_module(module), attribute)
    try:
        return make()
    except ImportError as error:
        raise ConfigError(
            f"trackers: {name} is installed but cannot be imported ({error}); pip install --upgrade {name}"
        ) from error
