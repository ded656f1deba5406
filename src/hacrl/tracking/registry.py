"""Make trackers by name. A tool is imported only if a recipe names it."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

from hacrl.config.load import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.plugins import load_plugin
from hacrl.tracking.base import Backend, TrackedRun, Tracker
from hacrl.training.observer import Observer

# Name -> class. The name is also that of the tool's package, on PyPI and in Python.
BACKENDS: dict[str, str] = {
    "tensorboard": "hacrl.tracking.tensorboard:TensorBoard",
    "wandb": "hacrl.tracking.wandb:Wandb",
    "trackio": "hacrl.tracking.trackio:Trackio",
    "mlflow": "hacrl.tracking.mlflow:Mlflow",
}

ENTRY_POINTS = "hacrl.trackers"  # entry point group of trackers in installed packages


def make_trackers(config: RunConfig, folder: Path) -> list[Observer]:
    """Return one tracker per name; refuse an unknown name or a missing package before anything loads."""
    run = tracked_run(config, folder)
    return [Tracker(name, _make_backend(name), run) for name in dict.fromkeys(config.trackers)]


def tracked_run(config: RunConfig, folder: Path) -> TrackedRun:
    """Return what trackers need to know about a run."""
    return TrackedRun(
        folder=folder,
        project=config.project,
        name=folder.resolve().name,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        config_yaml=config_to_yaml(config),
        agents=tuple(agent.name for agent in config.agents),
        logged_rollouts=config.logged_rollouts,
    )


def _make_backend(name: str) -> Backend:
    is_builtin = name in BACKENDS
    if is_builtin and find_spec(name) is None:
        raise ConfigError(
            f"trackers: {name} needs the package {name!r}, which is not installed; "
            f"pip install 'hacrl[{name}]' (or pip install {name}), or leave it out of trackers"
        )
    backend_class = load_plugin("tracker", name, BACKENDS, ENTRY_POINTS, key="trackers")
    try:
        backend = backend_class()
    except Exception as error:
        if not is_builtin:  # a user's own class may raise anything
            raise ConfigError(
                f"trackers: {name!r} cannot be made: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise ConfigError(
            f"trackers: {name} is installed but cannot be imported ({error}); pip install --upgrade {name}"
        ) from error
    if not isinstance(backend, Backend):
        raise ConfigError(
            f"trackers: {name!r} does not make a hacrl.tracking.base.Backend (docs/extending.md)"
        )
    return backend
