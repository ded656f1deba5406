"""A run in this process: all agents on one machine, on one or more devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hacrl.agents.agent import Agent
from hacrl.algorithms.methods import make_method
from hacrl.config.checks import updates_per_step
from hacrl.config.schema import RunConfig
from hacrl.exchange.in_process import InProcessExchange
from hacrl.execution.preflight import device_of, preflight
from hacrl.execution.results import RunResult
from hacrl.execution.run_folder import RunFolder, check_output
from hacrl.learning.learner import Learner
from hacrl.learning.observer import Observer, Observers
from hacrl.learning.samples import SampleBuilder
from hacrl.learning.trainer import Participant, Trainer
from hacrl.rollout.transformers_engine import TransformersEngine
from hacrl.tasks.registry import make_task
from hacrl.tasks.stream import ProblemStream


def run_locally(config: RunConfig, observers: Sequence[Observer] = (), overwrite: bool = False) -> RunResult:
    """Train, write the run's folder, save the agents. Nothing is written before all models have loaded."""
    preflight(config)
    check_output(config, overwrite)
    config = with_threads(config)
    folder = RunFolder(config)
    result = RunResult(folder.path)
    observer = Observers([folder, result, *observers])
    trainer = build_trainer(config, observer)
    folder.claim(overwrite)
    trainer.train(config.steps)
    for participant in trainer.participants:
        observer.on_phase(config.steps, "save", participant.name)
        folder.save_agent(participant.agent)
    return result


def with_threads(config: RunConfig) -> RunConfig:
    """The number of CPU threads written down: sums over other numbers of threads round differently."""
    return config if config.threads else replace(config, threads=torch.get_num_threads())


def build_trainer(config: RunConfig, observer: Observer | None = None) -> Trainer:
    """Load the agents and wire everything together."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    task = make_task(config.task)
    stream = ProblemStream(task.train, config.rollout.prompts_per_step, config.seed)
    method = make_method(config.method)
    agents = [Agent.load(settings, device_of(config, settings)) for settings in config.agents]
    fingerprints = {agent.name: agent.tokenizer_fingerprint for agent in agents}
    sampling = config.rollout.sampling
    participants = [
        Participant(
            agent=agent,
            engine=TransformersEngine(agent, config.rollout.max_batch),
            builder=SampleBuilder(agent, fingerprints, method, config.learning.learn_stop_token),
            learner=Learner(agent, method, config.learning, sampling, settings.lr),
            rollouts_per_prompt=config.rollouts_per_prompt(settings),
        )
        for agent, settings in zip(agents, config.agents, strict=True)
    ]
    return Trainer(
        participants=participants,
        method=method,
        task=task,
        stream=stream,
        exchange=InProcessExchange([agent.name for agent in agents]),
        sampling=sampling,
        evaluation=config.evaluation,
        updates_per_step=updates_per_step(config),
        seed=config.seed,
        observer=observer,
    )
