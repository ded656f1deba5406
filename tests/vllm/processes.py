"""Looking at the processes of a vLLM server from outside."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil

GONE_SECONDS = 60  # a hang guard


def servers_of(folder: Path, parent: int | None = None) -> list[psutil.Process]:
    """Servers below this process that serve a model from the folder."""
    return [
        process for process in psutil.Process(parent).children(recursive=True) if _serves(process, folder)
    ]


def _serves(process: psutil.Process, folder: Path) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "vllm.entrypoints.openai.api_server" in command and str(folder / "model") in command


def with_children(server: psutil.Process) -> list[psutil.Process]:
    """The server and what it started."""
    return [server, *server.children(recursive=True)]


def engine_core(server: psutil.Process) -> psutil.Process:
    """The child that computes."""
    found = [child for child in server.children(recursive=True) if "EngineCore" in child.name()]
    assert len(found) == 1, found
    return found[0]


def still_there(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end."""
    deadline = time.monotonic() + GONE_SECONDS
    while (alive := [p for p in processes if _is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
