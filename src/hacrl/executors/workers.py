"""Build the agents' workers from a run's settings."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from hacrl.algorithms.methods import make_method
from hacrl.config.checks import updates_per_step
from hacrl.config.schema import AgentSettings, RunConfig
from hacrl.engines.registry import make_engine
from hacrl.executors.local import LocalExecutor
from hacrl.memory.decision import decide_memory
from hacrl.memory.residency import Residency
from hacrl.models.agent import Agent
from hacrl.models.loading import check_weights_exist
from hacrl.models.own_policy import rollout_limit
from hacrl.models.retokenizing import Retokeniser
from hacrl.seeding import derive_seed
from hacrl.tasks.base import CheckedTask
from hacrl.training.learner import Learner
from hacrl.training.lr_schedule import LearningRateSchedule
from hacrl.training.offload import Transfers
from hacrl.training.samples import SampleBuilder
from hacrl.training.worker import AgentWorker, WorkerSettings


def make_local_executor(
    config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]
) -> LocalExecutor:
    """Load all agents into this process; decide what agents that share a device offload from it."""
    agents = load_agents(config, checked, loaded)
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
    return LocalExecutor(workers, residency)


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
    method = make_method(config.method, checked.task.max_reward)
    engine = make_engine(config, settings, agent, checked)
    rollout, learning = config.rollout, config.learning
    learner = Learner(
        agent,
        method,
        replace(learning, micro_batch_tokens=micro_batch_tokens or learning.micro_batch_tokens),
        rollout.sampling,
        settings.lr,
        exact_sampler=engine.shares_weights and agent.model.dtype == torch.float32,
        offload_to=transfers,
        max_policy_gap=rollout_limit(settings.vllm.max_logprob_gap),
    )
    builder = SampleBuilder(
        agent,
        method,
        config.method.choices.learn_stop_token,
        learning.max_cross_rollouts,
        retokeniser,
        mask_truncated=learning.mask_truncated,
        overlong=(rollout.max_new_tokens, learning.overlong_buffer),
    )
    worker_settings = WorkerSettings(
        seed=config.seed,
        rollouts_per_prompt=config.rollouts_per_prompt(settings),
        rollout_sampling=rollout.sampling,
        evaluation_samples=config.evaluation.samples_per_problem,
        evaluation_sampling=config.evaluation.sampling(rollout.max_new_tokens),
        updates_per_step=updates_per_step(config),
        lr_schedule=LearningRateSchedule.of(config),
    )
    return AgentWorker(agent, engine, learner, builder, checked.task, worker_settings, verify_lock)


def load_agents(config: RunConfig, checked: CheckedTask, loaded: Mapping[str, Agent]) -> list[Agent]:
    """Return all agents in the config's order. Raise for missing weights before any are loaded."""
    for settings in config.agents:
        if settings.name not in loaded:
            check_weights_exist(settings)
    return [
        loaded.get(settings.name)
        or Agent.load(settings, checked.devices[settings.name], derive_seed(config.seed, settings.name))
        for settings in config.agents
    ]
