"""``hacrl serve``: a vLLM server for one agent of a recipe, for runs on this host or another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hacrl.config.schema import RunConfig
from hacrl.engines.registry import engine_notes, engine_seed
from hacrl.engines.vllm.checks import api_key, check_vllm
from hacrl.engines.vllm.launch import engine_arguments, engine_environment, runs_on_cpu, server_command
from hacrl.errors import ConfigError
from hacrl.models.device import agent_device
from hacrl.models.loading import load_model_config, torch_precision
from hacrl.models.model_sources import materialise_model


@dataclass(frozen=True)
class ServerPlan:
    """The command, environment and URL of a server that is not started yet."""

    command: list[str]
    environment: Mapping[str, str]
    url: str
    notes: tuple[str, ...] = ()  # for the user, a sentence each


def plan_server(config: RunConfig, name: str, host: str, port: int) -> ServerPlan:
    """Return the plan for an agent's server: as hacrl starts it, but with the model's own weights."""
    found = [agent for agent in config.agents if agent.name == name]
    if not found:
        names = ", ".join(agent.name for agent in config.agents)
        raise ConfigError(f"there is no agent {name!r} in this recipe; it has {names}")
    agent = found[0]
    if agent.vllm.engines > 1:
        raise ConfigError(
            f"agents.{name}.vllm.engines={agent.vllm.engines}, but hacrl serve starts one server: run it "
            f"once for each engine, with agents.{name}.vllm.engines=1, its devices and its --port"
        )
    settings = replace(agent.vllm, url=None, mode="server")
    check_vllm(name, settings)
    device = torch.device(agent_device(config, agent))
    dtype = str(torch_precision(agent, load_model_config(agent), device.type)).removeprefix("torch.")
    arguments = engine_arguments(
        materialise_model(agent.model),
        dtype,
        settings,
        max_length=None,
        on_cpu=runs_on_cpu(device, settings),
        can_sleep=bool(settings.sleep),
        seed=engine_seed(config, name),
    )
    arguments["load_format"] = "safetensors"  # never pickled weights
    environment = engine_environment(device, settings)
    if key := api_key():
        environment["VLLM_API_KEY"] = key
    command = server_command(settings.python or sys.executable, arguments, host, port)
    served = replace(config, agents=(replace(agent, engine="vllm", vllm=settings),))
    notes = engine_notes(served, {name: str(device)})
    return ServerPlan(command, environment, f"http://{host}:{port}", notes)


def serve(plan: ServerPlan) -> None:
    """Replace this process by the server."""
    os.execvpe(plan.command[0], plan.command, {**os.environ, **plan.environment})
