"""An executor that does not know that an agent may have several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from hacrl.config.schema import RunConfig
from hacrl.executors.local import LocalExecutor
from hacrl.executors.workers import load_agents, make_worker
from hacrl.models.agent import Agent
from hacrl.tasks.base import CheckedTask


def unranked(config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> LocalExecutor:
    """Make an executor with all workers in this process."""
    agents = load_agents(config, checked, loaded)
    return LocalExecutor(
        [
            make_worker(config, settings, agent, checked)
            for settings, agent in zip(config.agents, agents, strict=True)
        ]
    )
