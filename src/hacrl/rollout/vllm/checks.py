"""What an agent's vLLM engine needs, checked before any model loads."""

from __future__ import annotations

import importlib.util
import os
import subprocess

from hacrl.agents.engine_settings import VllmSettings
from hacrl.errors import ConfigError

LOOK_SECONDS = 120
PROCESSOR_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # of a GPU, for processes under NVIDIA's MPS


def api_key_of(settings: VllmSettings) -> str | None:
    """The key for a server at a URL: never in a config file, which is copied into run folders."""
    return os.environ.get(settings.api_key_variable)


def check_vllm(name: str, settings: VllmSettings) -> None:
    """vLLM is there, or the server answers as it should."""
    key = f"agents.{name}.vllm"
    if settings.url is not None or settings.starts_server:
        _require("aiohttp", f"{key}: talking to a server needs aiohttp: pip install 'hacrl[server]'")
    if settings.url is not None:
        _check_server(key, settings)
    elif settings.python is not None:
        _check_interpreter(f"{key}.python", settings.python)
    else:
        _require(
            "vllm",
            f"agents.{name}.engine is vllm, but vllm is not installed here: pip install 'hacrl[vllm]', or "
            f"name an interpreter that has it in {key}.python, or a server in {key}.url (docs/vllm.md)",
        )


def processor_limit() -> str | None:
    """Percent of a GPU's processors that an engine would inherit as its limit; None: it has all of them."""
    value = os.environ.get(PROCESSOR_LIMIT, "").strip()
    try:
        return value if float(value) < 100 else None
    except ValueError:
        return None


def _require(module: str, message: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(message)


def _check_interpreter(key: str, python: str) -> None:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, timeout=LOOK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: {python} cannot be run: {error}") from error
    if found.returncode:
        raise ConfigError(f"{key}: {python} has no vllm; install it there (docs/vllm.md)")


def _check_server(key: str, settings: VllmSettings) -> None:
    """Reachable, takes our key, and lets weights in."""
    from hacrl.rollout.vllm.backend import EngineError
    from hacrl.rollout.vllm.client import ServerClient
    from hacrl.rollout.vllm.server import ServerBackend

    assert settings.url is not None
    client = ServerClient(f"vLLM server {settings.url}", settings.url, api_key_of(settings))
    backend = ServerBackend(client, process=None, can_sleep=False)
    try:
        backend.start()
        backend.call("hacrl_describe")
    except EngineError as error:
        hint = ""
        if "API key" in str(error):
            hint = f"; put the server's key into the environment variable {settings.api_key_variable}"
        raise ConfigError(f"{key}.url: {error}{hint}") from error
