"""``executor: ray`` before any model loads: which device each agent is on, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError
from hacrl.executors.ray.cluster import Cluster, import_ray
from hacrl.executors.ray.executor import RayExecutor
from hacrl.executors.ray.placement import parties_of
from hacrl.models.agent import Agent
from hacrl.tasks.base import CheckedTask


class RayKind:
    """Makes the executor, and chooses the agents' devices."""

    def devices(self, config: RunConfig) -> dict[str, str]:
        """Return agent -> ``cuda`` or ``cpu``; raise ConfigError for what a cluster cannot do."""
        import_ray()
        devices = {agent.name: agent.device or config.device for agent in config.local_agents}
        devices |= {agent.name: "cpu" for agent in config.agents if agent.endpoint is not None}
        for agent in config.agents:
            key = "device" if agent.device is None else f"agents.{agent.name}.device"
            if devices[agent.name] not in ("auto", "cpu", "cuda"):
                raise ConfigError(
                    f"{key}={devices[agent.name]!r}: with executor: ray the cluster chooses the GPU; use "
                    f"auto, cpu or cuda, and agents.{agent.name}.place to say where"
                )
        undecided = [
            agent for agent in config.agents if devices[agent.name] == "auto" and agent.place.gpus is None
        ]
        has_gpus = bool(undecided) and _cluster_has_gpus(config)
        for agent in config.agents:
            if devices[agent.name] == "auto":
                wants_gpu = has_gpus if agent.place.gpus is None else agent.place.gpus > 0
                devices[agent.name] = "cuda" if wants_gpu else "cpu"
        return devices

    def __call__(self, config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> RayExecutor:
        """Place all agents, and return the executor that drives them."""
        for name in loaded:
            raise ConfigError(
                f"executor: ray loads every agent on its own machine, so agents.{name}.model must be a name "
                "or a folder, not an object; or use executor: local"
            )
        cluster = Cluster(config)
        try:
            parties = parties_of(config, checked.devices, cluster.hosts)
            return RayExecutor(config, checked, cluster, parties)
        except BaseException:
            cluster.disconnect()
            raise


def _cluster_has_gpus(config: RunConfig) -> bool:
    if config.ray.address is None:  # the cluster will be this machine
        return torch.cuda.is_available()
    cluster = Cluster(config)
    try:
        return cluster.has_gpus
    finally:
        cluster.disconnect()


make_ray_executor = RayKind()
