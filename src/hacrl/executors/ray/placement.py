"""What the agents' processes ask of a cluster, and the rooms that the cluster gives them.

Agents that share a process are one *party*. A party has a bundle for the process of its rank 0, and one for
each further rank and each replica. Ray's placement group gives it all bundles at once, or none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.errors import ConfigError

ON_HOST = 0.001  # of Ray's resource node:ADDRESS, of which each machine has 1


class Member(NamedTuple):
    """A further process of an agent."""

    agent: str
    role: Literal["rank", "replica"]
    number: int


@dataclass(frozen=True)
class Party:
    """Agents that live in one process, with the further processes of each."""

    name: str
    agents: tuple[AgentSettings, ...]
    bundle: Mapping[str, float]  # what each of its processes asks for
    engine_gpus: int = 0  # further GPUs of the first process, for its engines

    @property
    def members(self) -> list[Member]:
        """The further processes."""
        ranks = [Member(agent.name, "rank", rank) for agent in self.agents for rank in range(1, agent.ranks)]
        replicas = [
            Member(agent.name, "replica", number)
            for agent in self.agents
            for number in range(agent.replicas.count if agent.endpoint is None else 0)
        ]
        return [*ranks, *replicas]

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What the party asks for: the bundle of rank 0 first."""
        first = dict(self.bundle)
        if self.engine_gpus:
            first["GPU"] = first.get("GPU", 0.0) + self.engine_gpus
        return [first, *(dict(self.bundle) for _ in self.members)]


def parties_of(config: RunConfig, devices: Mapping[str, str], hosts: Mapping[str, str]) -> list[Party]:
    """Return the run's parties in the order of their first agents.

    ``hosts``: host name or address -> address, of all machines of the cluster.
    """
    members: dict[str, list[AgentSettings]] = {}
    for agent in config.agents:
        members.setdefault(agent.place.share or f"agent {agent.name}", []).append(agent)
    found = []
    for name, agents in members.items():
        _check_sharing(name, agents, devices)
        bundle = _bundle(agents[0], devices[agents[0].name], hosts)
        found.append(Party(name, tuple(agents), bundle, agents[0].place.engine_gpus))
    return found


def _check_sharing(name: str, agents: Sequence[AgentSettings], devices: Mapping[str, str]) -> None:
    first = agents[0]
    for agent in agents:
        if agent.replicas.devices is not None:
            raise ConfigError(
                f"agents.{agent.name}.replicas.devices: with executor: ray the cluster chooses the copies' "
                "GPUs; leave devices out"
            )
    for agent in agents[1:]:
        if agent.ranks > 1 or first.ranks > 1:
            several = agent if agent.ranks > 1 else first
            raise ConfigError(
                f"agents.{several.name}.place.share={name!r}: an agent with ranks={several.ranks} needs "
                "processes of its own; leave share out, or set ranks=1"
            )
        if agent.place != first.place:
            raise ConfigError(
                f"agents.{agent.name}.place differs from agents.{first.name}.place, but both share the "
                f"process {name!r}; give them the same values"
            )
        if devices[agent.name] != devices[first.name]:
            raise ConfigError(
                f"agents.{agent.name} is on {devices[agent.name]} and agents.{first.name} on "
                f"{devices[first.name]}, but both share the process {name!r}; give them the same device"
            )


def _bundle(agent: AgentSettings, device: str, hosts: Mapping[str, str]) -> dict[str, float]:
    place, key = agent.place, f"agents.{agent.name}.place"
    gpus = (1.0 if device == "cuda" else 0.0) if place.gpus is None else place.gpus
    if device == "cuda" and not gpus:
        raise ConfigError(
            f"{key}.gpus=0, but the agent is trained on a GPU; leave gpus out or set device: cpu"
        )
    bundle: dict[str, float] = {"CPU": place.cpus, "GPU": gpus, **place.resources}
    if place.accelerator is not None:
        bundle[f"accelerator_type:{place.accelerator}"] = ON_HOST
    if place.host is not None:
        if place.host not in hosts:
            known = ", ".join(sorted(hosts)) or "none"
            raise ConfigError(f"{key}.host: the cluster has no machine {place.host!r}; it has {known}")
        bundle[f"node:{hosts[place.host]}"] = ON_HOST
    return {name: amount for name, amount in bundle.items() if amount}


def described(bundles: Sequence[Mapping[str, float]]) -> str:
    """Return what bundles ask for, in words: ``4 x (1 GPU, 1 CPU)``."""
    counts: dict[str, int] = {}
    for bundle in bundles:
        text = ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items(), reverse=True))
        counts[text] = counts.get(text, 0) + 1
    return " and ".join(f"{count} x ({text or 'nothing'})" for text, count in counts.items())


def free_resources(available: Mapping[str, Any]) -> str:
    """Return what is free in the cluster, in words, without Ray's own entries."""
    shown = {
        name: amount
        for name, amount in available.items()
        if not name.startswith(("node:", "object_store_memory", "memory"))
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"
