"""Executors by name: ``local``, an installed package's, or ``module:attribute``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.executors.workers import make_local_executor
from hacrl.models.agent import Agent
from hacrl.plugins import installed_plugins, is_reference, load_reference
from hacrl.tasks.base import CheckedTask
from hacrl.training.executor import Executor

ExecutorFactory = Callable[[RunConfig, CheckedTask, Mapping[str, Agent]], Executor]

BUILT_IN: dict[str, ExecutorFactory] = {"local": make_local_executor}
ENTRY_POINTS = "hacrl.executors"  # group under which installed packages offer executors


def make_executor(config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> Executor:
    """Place all agents' workers; ``loaded`` agents (by name) are used as they are."""
    return find_executor(config.executor)(config, checked, loaded)


def find_executor(name: str) -> ExecutorFactory:
    """Return the function that makes the named executor."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    plugins = installed_plugins(ENTRY_POINTS)
    reference = name if is_reference(name) else plugins.get(name)
    if reference is None:
        known = [*BUILT_IN, *plugins]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}, and module:function"
        raise ConfigError(f"executor: there is no executor {name!r}; {hint}")
    factory: ExecutorFactory = load_reference(reference, "executor", ConfigError)
    if not callable(factory):
        raise ConfigError(f"executor: {name!r} is no function that makes an executor (docs/extending.md)")
    return factory
