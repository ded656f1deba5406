"""Executors by name: ``local``, ``ray``, an installed package's, or ``module:attribute``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.models.agent import Agent
from hacrl.plugins import load_plugin
from hacrl.tasks.base import CheckedTask
from hacrl.training.executor import Executor

ExecutorFactory = Callable[[RunConfig, CheckedTask, Mapping[str, Agent]], Executor]

BUILT_IN = {
    "local": "hacrl.executors.workers:make_local_executor",
    "ray": "hacrl.executors.ray.kind:make_ray_executor",
}
ENTRY_POINTS = "hacrl.executors"  # group under which installed packages offer executors


@runtime_checkable
class ChoosesDevices(Protocol):
    """An executor factory that says itself which device each agent is on, e.g. of another machine."""

    def devices(self, config: RunConfig) -> dict[str, str]:
        """Return agent -> device, before any model loads. Raise ConfigError for what cannot be placed."""
        ...


def make_executor(config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> Executor:
    """Place all agents' workers; ``loaded`` agents (by name) are used as they are."""
    return find_executor(config.executor)(config, checked, loaded)


def chooses_devices(config: RunConfig) -> bool:
    """Return whether the run's executor says itself which device each agent is on."""
    factory: object = find_executor(config.executor)
    return isinstance(factory, ChoosesDevices)


def chosen_devices(config: RunConfig) -> dict[str, str] | None:
    """Return agent -> device, as the run's executor chooses; None if it leaves that to the config."""
    factory: object = find_executor(config.executor)
    return factory.devices(config) if isinstance(factory, ChoosesDevices) else None


def find_executor(name: str) -> ExecutorFactory:
    """Return the function that makes the named executor."""
    factory: ExecutorFactory = load_plugin("executor", name, BUILT_IN, ENTRY_POINTS, key="executor")
    if not callable(factory):
        raise ConfigError(f"executor: {name!r} is not a function that makes an executor (docs/extending.md)")
    return factory
