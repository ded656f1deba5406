"""Build the agents' workers from a run's settings."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.checks import updates_per_step
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.registry import make_engine
from hacrl.errors import ConfigError
from hacrl.executors.learners import make_learner
from hacrl.executors.local import LocalExecutor
from hacrl.executors.rank_processes import RankProcesses
from hacrl.memory.decision import decide_memory
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.models.loading import check_weights_exist
from hacrl.models.retokenizing import Retokeniser
from hacrl.models.sharding import sharding_of
from hacrl.seeding import derive_seed
from hacrl.tasks.base import CheckedTask
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.offload import Transfers
from hacrl.training.samples import SampleBuilder
from hacrl.training.worker import AgentWorker, WorkerSettings


def make_local_executor(
    config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]
) -> LocalExecutor:
    """Load all agents; decide what agents that share a device offload from it.

    This process is rank 0 of agents with several ranks. The other ranks have processes of their own.
    """
    ranks = (
        RankProcesses(config, checked.devices) if any(agent.ranks > 1 for agent in config.agents) else None
    )
    try:
        return _make_local_executor(config, checked, loaded, ranks)
    except BaseException:
        if ranks is not None:
            ranks.end()
        raise


def _make_local_executor(
    config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent], ranks: RankProcesses | None
) -> LocalExecutor:
    agents = load_agents(config, checked, loaded, ranks)
    decided = decide_memory(config, checked, agents)
    residency = Residency(decided.notes)
    retokeniser, verify_lock = Retokeniser(), threading.Lock()  # shared by all workers of a process
    workers = []
    for agent, settings in zip(agents, decided.config.agents, strict=True):
        level = decided.levels[agent.name]
        worker = make_worker(
            decided.config,
            settings,
            agent,
            checked,
            micro_batch_tokens=decided.micro_batch_tokens[agent.name],
            transfers=residency.transfers(agent, level),
            retokeniser=retokeniser,
            verify_lock=verify_lock,
        )
        residency.add(agent, worker.learner, level)
        residency.offload(agent.name)  # before the next agent's float32 master weights are made
        workers.append(worker)
    return LocalExecutor(workers, residency, ranks)


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
) -> AgentWorker:
    """Return one agent's worker.

    ``transfers`` offloads the optimizer as soon as it is made. Workers that share a ``retokeniser`` share its
    results; workers that share a task share a ``verify_lock``.
    """
    if settings.ranks > 1 and sharding_of(agent.model) is None:
        raise ConfigError(
            f"agents.{agent.name}.ranks={settings.ranks}: executor {config.executor!r} gives every agent one "
            "rank; use executor: local, or leave ranks out"
        )
    method = make_method(config.method, checked.task.max_reward)
    engine = make_engine(config, settings, agent, checked)
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
    trust_window = config.method.trust_window
    worker_settings = WorkerSettings(
        seed=config.seed,
        rollouts_per_prompt=config.rollouts_per_prompt(settings),
        rollout_sampling=rollout.sampling,
        evaluation_samples=config.evaluation.samples_per_problem,
        evaluation_sampling=config.evaluation.sampling(rollout.max_new_tokens),
        updates_per_step=updates_per_step(config),
        updates_by_trust=tuple(
            learning.updates(1 + trusted)
            for trusted in range(0 if trust_window is None else len(config.agents))
        ),
        trust_window=trust_window or 2,
        steps=config.steps,
        lr_schedule=LearningRateSchedule.of(config),
    )
    return AgentWorker(agent, engine, learner, builder, checked.task, worker_settings, verify_lock)


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
