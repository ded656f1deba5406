"""Prepare an agent's vLLM engine: arguments, command, environment, model folder, and memory need."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hacrl.config.schema import MOST_MEMORY, VllmSettings
from hacrl.engines.sync_check import NUM_PROBES
from hacrl.engines.vllm.backend import Backend
from hacrl.engines.vllm.checks import api_key, has_weight_transfer
from hacrl.engines.vllm.child import ChildBackend
from hacrl.engines.vllm.client import ServerClient
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.in_vllm.hacrl_vllm_worker import BACKEND
from hacrl.engines.vllm.server import ServerBackend
from hacrl.engines.vllm.several import VllmEngines
from hacrl.engines.vllm.weight_transfer import free_port
from hacrl.models.agent import Agent
from hacrl.models.footprint import Footprint
from hacrl.processes import SupervisedProcess
from hacrl.seeding import derive_seed

LOCALHOST = "127.0.0.1"
WORKER_FOLDER = Path(__file__).parent / "in_vllm"  # all that vLLM's interpreter needs of hacrl
WORKER = "hacrl_vllm_worker.WeightReceiver"
GIB = 2**30
CPU_CACHE = GIB  # bytes of the KV cache on a CPU, unless engine_args.kv_cache_memory_bytes says more
START_SECONDS = 900.0  # until an engine must be ready
GRAPH_STEP = 16  # between the batch sizes of vLLM's CUDA graphs; below 256 the steps are smaller
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # vLLM reports usage otherwise


def make_vllm_engines(
    agent: Agent,
    settings: VllmSettings,
    probes: Sequence[tuple[int, ...]],
    max_length: int,
    folder: Path,
    seed: int = 0,
    reads_text: bool = False,
) -> VllmEngine | VllmEngines:
    """Return an agent's engine, or its engines as one, in folders ``engine-0``, ``engine-1`` and so on.

    The arguments are those of :func:`make_vllm_engine`.
    """
    each = settings.each()
    if len(each) == 1:
        return make_vllm_engine(agent, each[0], probes, max_length, folder, seed, reads_text)
    engines = [
        make_vllm_engine(
            agent,
            one,
            probes,
            max_length,
            folder / f"engine-{number}",
            derive_seed(seed, number),
            reads_text,
            owner=f"agent {agent.name!r} (number {number})",
        )
        for number, one in enumerate(each)
    ]
    return VllmEngines(agent, engines)


def make_vllm_engine(
    agent: Agent,
    settings: VllmSettings,
    probes: Sequence[tuple[int, ...]],
    max_length: int,
    folder: Path,
    seed: int = 0,
    reads_text: bool = False,
    owner: str | None = None,
) -> VllmEngine:
    """Return an engine for an agent, not started yet. ``folder`` takes its log and the files it starts from.

    ``seed`` applies to responses without a seed of their own; equal agents must not draw the same responses.
    ``reads_text``: requests may have stop strings. ``owner``: whose engine it is, for messages.
    """
    owner = owner or f"agent {agent.name!r}"
    (url,) = settings.urls or (None,)
    if url is not None:
        client = ServerClient(f"vLLM server {url}", url, api_key(), timeout=settings.timeout)
        backend: Backend = ServerBackend(client, process=None, can_sleep=bool(settings.sleep))
        local = host_of(url) in (LOCALHOST, "localhost", "::1")
        reached_at = LOCALHOST if local else address_towards(host_of(url))
        return VllmEngine(agent, backend, settings, probes, same_host=local, learner_host=reached_at)
    can_sleep = sleeps(agent.device, settings)
    model = folder / "model"
    dtype = str(agent.model.dtype).removeprefix("torch.")
    on_cpu = runs_on_cpu(agent.device, settings)
    arguments = engine_arguments(str(model), dtype, settings, max_length, on_cpu, can_sleep, seed)
    arguments["load_format"] = "dummy"  # random until the first weight sync
    environment = engine_environment(agent.device, settings)
    measures_memory = not arguments.get("kv_cache_memory_bytes")
    if settings.starts_server:
        backend = _own_server(owner, settings, arguments, environment, folder, can_sleep)
        before = partial(write_model, agent, model)
        return VllmEngine(agent, backend, settings, probes, before_start=before, starts_alone=measures_memory)
    log = folder / "engine.log"
    child = ChildBackend(
        f"vLLM engine of {owner}",
        arguments,
        environment,
        can_sleep,
        log,
        START_SECONDS,
        reads_text,
        settings.timeout,
    )

    def before_start() -> None:
        child.launch()
        write_model(agent, model)

    return VllmEngine(agent, child, settings, probes, before_start=before_start, starts_alone=measures_memory)


def _own_server(
    owner: str,
    settings: VllmSettings,
    arguments: dict[str, Any],
    environment: dict[str, str],
    folder: Path,
    can_sleep: bool,
) -> ServerBackend:
    key, port = secrets.token_urlsafe(24), free_port()
    where = f"vLLM server of {owner}"
    process = SupervisedProcess(
        where,
        server_command(settings.python or sys.executable, arguments, LOCALHOST, port),
        {**environment, "VLLM_API_KEY": key},
        folder / "server.log",
        START_SECONDS,
    )
    url = f"http://{LOCALHOST}:{port}"
    client = ServerClient(where, url, key, model=arguments["model"], timeout=settings.timeout)
    return ServerBackend(client, process, can_sleep, has_weight_transfer(settings))


def server_command(python: str, arguments: dict[str, Any], host: str, port: int) -> list[str]:
    """Return the command of vLLM's own server with hacrl's worker extension."""
    options = {**arguments, "worker_extension_cls": WORKER, "host": host, "port": port}
    if "weight_transfer_config" in arguments:  # a version whose tokens are labelled with their weights
        options["enable_scale_out"] = True
    options["generation_config"] = "vllm"  # requests carry sampling settings; the model's are ignored
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is False:
            command.append(f"--no-{flag[2:]}")
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return command


def engine_arguments(
    model: str,
    dtype: str,
    settings: VllmSettings,
    max_length: int | None,
    on_cpu: bool,
    can_sleep: bool,
    seed: int = 0,
) -> dict[str, Any]:
    """Return vLLM's arguments for a model's folder or hub id; ``max_length`` None: the model's context."""
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "max_num_seqs": decoding_slots(settings),
        "enable_prefix_caching": True,  # the samples of a prompt share its keys and values
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
        "enable_sleep_mode": can_sleep,
        "seed": seed % 2**32,  # the range that numpy accepts
    }
    if has_weight_transfer(settings):
        arguments["weight_transfer_config"] = {"backend": BACKEND}
    if max_length is not None:
        arguments["max_model_len"] = max_length
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = CPU_CACHE
        arguments["enforce_eager"] = True
    else:
        arguments["gpu_memory_utilization"] = settings.memory or MOST_MEMORY
        if settings.devices and len(settings.devices) > 1:
            arguments["tensor_parallel_size"] = len(settings.devices)
    return {**arguments, **settings.engine_args}


def decoding_slots(settings: VllmSettings) -> int:
    """Return how many sequences an engine decodes at a time, those of the weight-sync check included.

    vLLM records full CUDA graphs up to this number. If the number were between two graph sizes, larger
    batches, e.g. the check beside 256 responses, would run in another kind of graph.
    """
    return -(-(settings.max_sequences + NUM_PROBES) // GRAPH_STEP) * GRAPH_STEP


def engine_environment(device: torch.device, settings: VllmSettings) -> dict[str, str]:
    """Return the environment variables of the engine's processes."""
    environment = dict(ENVIRONMENT)
    if "VLLM_PORT" not in os.environ:
        # vLLM searches free ports from here on; engines that start together would find the same one
        environment["VLLM_PORT"] = str(free_port())
    if settings.starts_server:
        inherited = (
            [os.environ["PYTHONPATH"]] if settings.python is None and "PYTHONPATH" in os.environ else []
        )
        environment["PYTHONPATH"] = os.pathsep.join([str(WORKER_FOLDER), *inherited])
        environment["VLLM_SERVER_DEV_MODE"] = "1"  # weight updates, sleep and wake over HTTP
    if runs_on_cpu(device, settings):
        environment["TORCH_COMPILE_DISABLE"] = "1"
    elif settings.devices or device.index is not None:
        chosen = settings.devices or (device.index,)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(
            _visible(index) for index in chosen if index is not None
        )
    return environment


def _visible(index: int) -> str:
    """Return the system's number or id of this process's device ``index``."""
    visible = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return visible[index] if index < len(visible) else str(index)


def runs_on_cpu(device: torch.device, settings: VllmSettings) -> bool:
    """Return whether the engine runs on a CPU: its agent does, and the engine has no devices of its own."""
    return device.type == "cpu" and not settings.devices


def sleeps(device: torch.device, settings: VllmSettings) -> bool:
    """Return whether the engine sleeps while its agent learns: by default on a GPU that they share."""
    on_gpu = device.type == "cuda" or bool(settings.devices)
    if settings.sleep is not None:
        return settings.sleep and on_gpu
    shared = settings.devices is None or (device.index or 0) in settings.devices
    return device.type == "cuda" and shared


def write_model(agent: Agent, folder: Path) -> None:
    """Write the agent's config and tokenizer, which an engine needs besides the weights."""
    model = agent.model.get_base_model() if hasattr(agent.model, "peft_config") else agent.model
    if not model.config.architectures:  # unset for a model that was never saved or loaded
        model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    agent.tokenizer.save_pretrained(folder)


def host_of(url: str) -> str:
    """Return the host in a URL."""
    from urllib.parse import urlsplit

    return urlsplit(url).hostname or ""


def address_towards(host: str) -> str:
    """Return this machine's address on the network towards the other host."""
    import socket
    from contextlib import closing

    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


# Memory besides weights and cache: the CUDA context, graphs, and vLLM's profiling pass over a full batch of
# tokens, which grows with the model.
OVERHEAD = 3 * GIB
OVERHEAD_PER_WEIGHT_BYTE = 1 / 8


def shares_device(device: torch.device, settings: VllmSettings) -> bool:
    """Return whether the engine runs on its agent's device."""
    return not settings.urls and (settings.devices is None or (device.index or 0) in settings.devices)


def engine_bytes(footprint: Footprint, device: torch.device, settings: VllmSettings, total: int) -> int:
    """Return the engine's memory on its agent's device, which has ``total`` bytes.

    ``footprint``: the agent's, as if it decoded as many responses at a time itself.
    """
    if not shares_device(device, settings):
        return 0
    if runs_on_cpu(device, settings):
        return int(settings.engine_args.get("kv_cache_memory_bytes") or CPU_CACHE) + footprint.weights
    held = footprint.weights + OVERHEAD + int(OVERHEAD_PER_WEIGHT_BYTE * footprint.weights)
    cache = settings.engine_args.get("kv_cache_memory_bytes")
    if cache is not None:  # then vLLM's share of the GPU does not count
        return int(cache) + held
    share = settings.engine_args.get("gpu_memory_utilization", settings.memory)
    if share is not None:
        return int(share * total)
    return min(held + footprint.cache + footprint.decoding, int(MOST_MEMORY * total))
