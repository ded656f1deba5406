"""Trackers by name. A tool is imported only if it is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from hacrl.config.load import config_to_yaml
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.plugins import installed_plugins, is_reference, load_reference
from hacrl.tracking.base import Backend, TrackedRun, Tracker
from hacrl.training.observer import Observer

# name -> where its class is; the name is also the package's, on PyPI and in Python
BACKENDS: dict[str, str] = {
    "tensorboard": "hacrl.tracking.tensorboard:TensorBoard",
    "wandb": "hacrl.tracking.wandb:Wandb",
    "trackio": "hacrl.tracking.trackio:Trackio",
    "mlflow": "hacrl.tracking.mlflow:Mlflow",
}

ENTRY_POINTS = "hacrl.trackers"  # group under which installed packages offer trackers


def make_trackers(config: RunConfig, folder: Path) -> list[Observer]:
    """A tracker per name; an unknown name or a missing package is refused here, before anything loads."""
    run = tracked_run(config, folder)
    return [Tracker(name, _make_backend(name), run) for name in dict.fromkeys(config.trackers)]


def tracked_run(config: RunConfig, folder: Path) -> TrackedRun:
    """What trackers are told of a run."""
    return TrackedRun(
        folder=folder,
        project=config.project,
        name=folder.resolve().name,
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        config_yaml=config_to_yaml(config),
        agents=tuple(agent.name for agent in config.agents),
        logged_rollouts=config.logged_rollouts,
    )


def _make_plugin(name: str, make: Callable[[], Backend]) -> Backend:
    try:
        backend = make()
    except Exception as error:  # whatever the user's own class does
        raise ConfigError(f"trackers: {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise ConfigError(f"trackers: {name!r} makes no hacrl.tracking.base.Backend (docs/extending.md)")
    return backend


def _make_backend(name: str) -> Backend:
    plugins = {} if name in BACKENDS else installed_plugins(ENTRY_POINTS)
    reference = name if is_reference(name) else plugins.get(name)
    if reference is not None:
        return _make_plugin(name, load_reference(reference, "trackers", ConfigError))
    if name not in BACKENDS:
        known = [*BACKENDS, *plugins]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, and module:Backend"
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
