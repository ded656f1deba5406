"""Build the agents' workers from a run's settings."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.checks import updates_per_step
from hacrl.config.schema import AgentSettings, OffloadLevel, RunConfig
from hacrl.engines.episodes import make_answerer
from hacrl.engines.registry import make_engine
from hacrl.engines.replicas.placement import ReplicaPlacement
from hacrl.errors import ConfigError
from hacrl.executors.learners import make_learner
from hacrl.executors.local import LocalExecutor, Worker
from hacrl.executors.rank_processes import RankLauncher, RankProcesses
from hacrl.memory.decision import decide_memory
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.models.fingerprint import weights_fingerprint
from hacrl.models.loading import check_weights_exist
from hacrl.models.retokenizing import Retokeniser
from hacrl.models.sharding import sharding_of
from hacrl.seeding import derive_seed
from hacrl.tasks.base import CheckedTask
from hacrl.training.frozen import FrozenWorker
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.offload import Transfers
from hacrl.training.samples import SampleBuilder
from hacrl.training.worker import AgentWorker, WorkerSettings


@dataclass(frozen=True)
class Elsewhere:
    """What starts further processes of agents that need not be on this machine; None: on this machine."""

    ranks: RankLauncher | None = None
    replicas: Mapping[str, ReplicaPlacement] = field(default_factory=dict)  # by agent


def make_local_executor(
    config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]
) -> LocalExecutor:
    """Load all agents; decide what agents that share a device offload from it.

    This process is rank 0 of agents with several ranks. The other ranks have processes of their own.
    """
    return make_executor_of([agent.name for agent in config.agents], config, checked, loaded)


def make_executor_of(
    names: Sequence[str],
    config: RunConfig,
    checked: CheckedTask,
    loaded: Mapping[str, Agent],
    elsewhere: Elsewhere | None = None,
) -> LocalExecutor:
    """Load some of the run's agents into this process."""
    elsewhere = elsewhere or Elsewhere()
    ranks = None
    if any(agent.ranks > 1 for agent in config.agents if agent.name in names):
        ranks = RankProcesses(config, names, checked.devices, elsewhere.ranks)
    try:
        return _make_executor_of(names, config, checked, loaded, ranks, elsewhere)
    except BaseException:
        if ranks is not None:
            ranks.end()
        raise


def _make_executor_of(
    names: Sequence[str],
    config: RunConfig,
    checked: CheckedTask,
    loaded: Mapping[str, Agent],
    ranks: RankProcesses | None,
    elsewhere: Elsewhere,
) -> LocalExecutor:
    verify_lock = threading.Lock()
    endpoints = {
        settings.name: make_endpoint_worker(config, settings, checked, verify_lock)
        for settings in config.agents
        if settings.name in names and settings.endpoint is not None
    }
    here = replace(config, agents=tuple(one for one in config.local_agents if one.name in names))
    agents = load_agents(here, checked, loaded, ranks)
    decided = decide_memory(here, checked, agents)
    # Losses and updates depend on all agents of the run, memory on those that are here.
    settled = {agent.name: agent for agent in decided.config.agents}
    _check_all_fit(here, decided.levels)
    whole = replace(decided.config, agents=tuple(settled.get(agent.name, agent) for agent in config.agents))
    residency = Residency(decided.notes)
    # Shared by all workers of a process. Asynchronous agents are at different steps, and share no texts.
    retokeniser = None if config.asynchronous.is_on else Retokeniser()
    workers: dict[str, Worker] = dict(endpoints)
    for agent in agents:
        level = decided.levels[agent.name]
        if settled[agent.name].frozen:
            placement = elsewhere.replicas.get(agent.name)
            workers[agent.name] = make_frozen_worker(
                whole, settled[agent.name], agent, checked, verify_lock, placement
            )
            residency.add(agent, None, level)
            residency.offload(agent.name)
            continue
        worker = make_worker(
            whole,
            settled[agent.name],
            agent,
            checked,
            micro_batch_tokens=decided.micro_batch_tokens[agent.name],
            transfers=residency.transfers(agent, level),
            retokeniser=retokeniser,
            verify_lock=verify_lock,
            placement=elsewhere.replicas.get(agent.name),
        )
        residency.add(agent, worker.learner, level)
        residency.offload(agent.name)  # before the next agent's float32 master weights are made
        workers[agent.name] = worker
    in_order = [workers[agent.name] for agent in config.agents if agent.name in workers]
    return LocalExecutor(in_order, residency, ranks)


def _check_all_fit(config: RunConfig, levels: Mapping[str, OffloadLevel]) -> None:
    """Raise ConfigError if asynchronous agents would have to take turns on a device."""
    for name, level in levels.items():
        if config.asynchronous.is_on and level != "never":
            raise ConfigError(
                f"asynchronous.max_staleness={config.asynchronous.max_staleness}: all agents are at work at "
                f"once, but agent {name!r} does not fit on its device beside the others (learning.offload "
                f"would have to be {level}). Give it a device of its own (agents.{name}.device and "
                f"agents.{name}.replicas.devices), or set asynchronous.max_staleness=0"
            )


def make_worker(
    config: RunConfig,
    settings: AgentSettings,
    agent: Agent,
    checked: CheckedTask,
    *,
    micro_batch_tokens: int | None = None,
    transfers: Transfers | None = None,
    retokeniser: Retokeniser | None = None,
    verify_lock: AbstractContextManager[object] | None = None,
    placement: ReplicaPlacement | None = None,
) -> AgentWorker:
    """Return one agent's worker. ``placement`` starts its replicas; None: on this machine.

    ``transfers`` offloads the optimizer as soon as it is made. Workers that share a ``retokeniser`` share its
    results; workers that share a task share a ``verify_lock``.
    """
    if settings.ranks > 1 and sharding_of(agent.model) is None:
        raise ConfigError(
            f"agents.{agent.name}.ranks={settings.ranks}: executor {config.executor!r} gives every agent one "
            "rank; use executor: local, or leave ranks out"
        )
    method = make_method(config.method, checked.task.max_reward)
    engine = make_engine(config, settings, agent, checked, placement)
    rollout, learning = config.rollout, config.learning
    learner = make_learner(
        config,
        settings,
        agent,
        checked.task.max_reward,
        micro_batch_tokens=micro_batch_tokens,
        exact_sampler=engine.shares_weights and agent.model.dtype == torch.float32,
        transfers=transfers,
    )
    builder = SampleBuilder(
        agent,
        method,
        config.method.choices.learn_stop_token,
        learning.max_cross_rollouts,
        retokeniser,
        mask_truncated=learning.mask_truncated,
        overlong=(rollout.max_new_tokens, learning.overlong_buffer),
        probe_share=learning.epochs / learning.updates(1),
    )
    worker_settings = _worker_settings(config, settings)
    return AgentWorker(agent, engine, learner, builder, checked.task, worker_settings, verify_lock)


def make_frozen_worker(
    config: RunConfig,
    settings: AgentSettings,
    agent: Agent,
    checked: CheckedTask,
    verify_lock: AbstractContextManager[object] | None = None,
    placement: ReplicaPlacement | None = None,
) -> FrozenWorker:
    """Return the worker of a frozen agent whose model is loaded."""
    engine = make_engine(config, settings, agent, checked, placement)
    return FrozenWorker(
        agent.name,
        engine,
        make_answerer(agent, engine, checked.task, verify_lock),
        _worker_settings(config, settings),
        f"weights {weights_fingerprint(agent.model)[:16]}",
        agent,
    )


def make_endpoint_worker(
    config: RunConfig,
    settings: AgentSettings,
    checked: CheckedTask,
    verify_lock: AbstractContextManager[object] | None = None,
) -> FrozenWorker:
    """Ask an endpoint one question; return its worker. Raise ConfigError if it is of no use to the run."""
    from hacrl.engines.endpoint.answering import EndpointAnswerer
    from hacrl.engines.endpoint.trial import open_endpoint

    assert settings.endpoint is not None
    endpoint = open_endpoint(config, settings.name, settings.endpoint, checked.train[0])
    answers = EndpointAnswerer(endpoint, checked.task, verify_lock)
    worker_settings = _worker_settings(config, settings)
    return FrozenWorker(
        settings.name, endpoint, answers, worker_settings, f"endpoint model {settings.endpoint.model}"
    )


def _worker_settings(config: RunConfig, settings: AgentSettings) -> WorkerSettings:
    rollout, learning, trust_window = config.rollout, config.learning, config.method.trust_window
    return WorkerSettings(
        seed=config.seed,
        rollouts_per_prompt=config.rollouts_per_prompt(settings),
        rollout_sampling=rollout.sampling,
        evaluation_samples=config.evaluation.samples_per_problem,
        evaluation_sampling=config.evaluation.sampling(rollout.sampling),
        updates_per_step=updates_per_step(config),
        updates_by_trust=tuple(
            learning.updates(1 + trusted)
            for trusted in range(0 if trust_window is None else len(config.agents))
        ),
        trust_window=trust_window or 2,
        steps=config.steps,
        lr_schedule=LearningRateSchedule.of(config),
    )


def load_agents(
    config: RunConfig,
    checked: CheckedTask,
    loaded: Mapping[str, Agent],
    ranks: RankProcesses | None = None,
) -> list[Agent]:
    """Return all agents in the config's order. Raise for missing weights before any are loaded.

    ``ranks``: the other ranks of agents that have several.
    """
    for settings in config.agents:
        if settings.name not in loaded:
            check_weights_exist(settings)
    agents = []
    for settings in config.agents:
        device = checked.devices[settings.name]
        if settings.name in loaded:
            agents.append(loaded[settings.name])
        elif ranks is not None and settings.name in ranks.groups:
            agents.append(ranks.load(settings.name, device))
        else:
            agents.append(Agent.load(settings, device, derive_seed(config.seed, settings.name)))
    return agents
