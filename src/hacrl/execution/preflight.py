"""What can be checked of a run before anything is written or loaded."""

from __future__ import annotations

import re

import torch

from hacrl.agents.references import resolve_model
from hacrl.agents.settings import AgentSettings
from hacrl.config.schema import RunConfig
from hacrl.errors import ConfigError, ModelError
from hacrl.tasks.registry import make_task
from hacrl.tasks.stream import ProblemStream


def preflight(config: RunConfig) -> None:
    """Models that can be found, devices that are there, a task with enough problems."""
    for agent in config.agents:
        try:
            resolve_model(agent.model)
        except ModelError as error:
            raise ConfigError(f"agents.{agent.name}.{error}") from error
        check_device(device_of(config, agent))
    task = make_task(config.task)
    ProblemStream(task.train, config.rollout.prompts_per_step, config.seed)
    if config.evaluation.problems > len(task.test):
        raise ConfigError(
            f"evaluation.problems={config.evaluation.problems}, but task {task.name!r} holds out only "
            f"{len(task.test)} problems"
        )


def device_of(config: RunConfig, agent: AgentSettings) -> str:
    """The agent's own device, else the run's, else a GPU if there is one."""
    device = agent.device or config.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def check_device(device: str) -> None:
    """Refuse a device this machine does not have."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device: {device!r} is not a device hacrl can use: auto, cpu, cuda or cuda:N")
    kind = torch.device(device)
    if kind.type == "cuda" and (
        not torch.cuda.is_available() or (kind.index or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"device: {device!r} is not there (this machine has {torch.cuda.device_count()} CUDA devices); "
            "use device=cpu or device=auto"
        )
