"""Engines by name: ``transformers``, ``vllm``, an installed package's, or ``module:attribute``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch

from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.base import Engine
from hacrl.engines.kinds import EngineKind, EngineSpec
from hacrl.engines.replicas.placement import ReplicaPlacement
from hacrl.engines.sync_check import NUM_PROBES
from hacrl.errors import ConfigError
from hacrl.models.agent import Agent
from hacrl.plugins import load_plugin
from hacrl.seeding import derive_seed
from hacrl.tasks.base import CheckedTask

BUILT_IN = {
    "transformers": "hacrl.engines.hf.kind:TransformersKind",
    "vllm": "hacrl.engines.vllm.kind:VllmKind",
}
ENTRY_POINTS = "hacrl.engines"  # group under which installed packages offer engines
FOLDER = "engines"  # in a run's folder: logs, and what servers start from


@lru_cache
def engine_kind(name: str) -> EngineKind:
    """Return the kind of engine of that name; what it needs is imported now."""
    kind = load_plugin("engine", name, BUILT_IN, ENTRY_POINTS, key="engine")()
    if not isinstance(kind, EngineKind):
        raise ConfigError(f"engine: {name!r} makes no hacrl.engines.kinds.EngineKind (docs/extending.md)")
    return kind


def kind_of(config: RunConfig, agent: AgentSettings) -> EngineKind:
    """Return the kind of engine that generates an agent's responses."""
    return engine_kind(config.engine(agent)).variant(agent)


def check_engines(config: RunConfig) -> None:
    """Check before models load that the agents' engines can be used."""
    for name in dict.fromkeys(config.engine(agent) for agent in config.local_agents):
        agents = [agent for agent in config.local_agents if config.engine(agent) == name]
        engine_kind(name).check_together(agents)
        for agent in agents:
            kind_of(config, agent).check(agent)
    if config.asynchronous.is_on:
        check_beside_learning(config)


def check_beside_learning(config: RunConfig) -> None:
    """Check that every agent that learns can sample meanwhile."""
    for agent in config.learners:
        kind, name = kind_of(config, agent), config.engine(agent)
        if kind.samples_beside_learning:
            continue
        why = (
            "samples with the weights that it learns"
            if kind.shares_weights
            else f"has an engine ({name}) that reads the learner's weights whenever it generates"
        )
        raise ConfigError(
            f"asynchronous.max_staleness={config.asynchronous.max_staleness}: agent {agent.name!r} {why}, so "
            f"it cannot sample while it learns. Set agents.{agent.name}.replicas.count=1 with engine "
            "transformers, or asynchronous.max_staleness=0"
        )


def engine_notes(config: RunConfig, devices: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the user should know of the engines; ``devices`` are the agents'."""
    notes: tuple[str, ...] = ()
    on = {name: torch.device(device) for name, device in devices.items()}
    for name in dict.fromkeys(config.engine(agent) for agent in config.local_agents):
        agents = [agent for agent in config.local_agents if config.engine(agent) == name]
        notes += engine_kind(name).notes(agents, on)
    return notes


def make_engine(
    config: RunConfig,
    settings: AgentSettings,
    agent: Agent,
    checked: CheckedTask,
    placement: ReplicaPlacement | None = None,
) -> Engine:
    """Return the agent's engine for a run; one with a process of its own starts at its first use.

    ``placement`` says where the processes of replicas run, by default on this machine.
    """
    problems = (checked.train or checked.test)[:NUM_PROBES]
    spec = EngineSpec(
        agent=agent,
        settings=settings,
        rollout=config.rollout,
        probes=[agent.encode_prompt(problem) for problem in problems],
        max_length=longest_exchange(config, agent, checked),
        folder=Path(config.output) / FOLDER / agent.name,
        compiles=config.learning.compile,
        seed=engine_seed(config, agent.name),
        placement=placement,
    )
    return kind_of(config, settings).make(spec)


def engine_seed(config: RunConfig, agent: str) -> int:
    """Return the seed of an agent's engine in this run."""
    return derive_seed(config.seed, "engine", agent)


def longest_exchange(config: RunConfig, agent: Agent, checked: CheckedTask) -> int:
    """Return the tokens of the longest prompt with a full response, over training and evaluation."""
    training = config.rollout.sampling
    evaluation = config.evaluation.sampling(training)
    parts = [(checked.train, training.max_new_tokens), (checked.test, evaluation.max_new_tokens)]
    return max(agent.longest_prompt(problems) + new_tokens for problems, new_tokens in parts if problems)
