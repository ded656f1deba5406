"""vLLM servers shared by tests: one takes half a minute to start.

Nothing here imports vllm: tests marked ``vllm`` run in hacrl's own environment, servers in another one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hacrl.config.schema import VllmSettings
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import make_vllm_engine
from hacrl.engines.vllm.weight_transfer import free_port
from hacrl.models.agent import Agent
from tests.support.engines import CONTEXT, engine_agent, probe_prompts

KEY = "a key for tests"
START_SECONDS = 300  # a hang guard
SMALL = {"max_sequences": 64, "engine_args": {"kv_cache_memory_bytes": 107_374_182}}


@dataclass(frozen=True)
class Server:
    """A server that was started outside of any run."""

    url: str
    key: str
    log: Path

    def settings(self, **options) -> VllmSettings:
        """Of an agent that uses it."""
        return VllmSettings(url=self.url, **{"seeded": True, **options})

    def engine(self, agent: Agent, **options) -> VllmEngine:
        """An engine for an agent; the server stays when it is closed."""
        return make_vllm_engine(
            agent, self.settings(**options), probe_prompts(agent), CONTEXT, self.log.parent
        )


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """An interpreter that has vLLM."""
    python = os.environ.get("HACRL_VLLM_PYTHON")
    if not python:
        pytest.skip("HACRL_VLLM_PYTHON names no interpreter with vLLM (make test-vllm)")
    return python


@pytest.fixture(scope="session")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """``hacrl serve`` with a random agent of the shape :func:`engine_agent` makes, and with a key."""
    folder = tmp_path_factory.mktemp("served")
    engine_agent(seed=99).save(folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"agents: [{{name: ada, model: {folder / 'model'}, vllm: {{python: {vllm_python}, "
        f"max_sequences: {SMALL['max_sequences']}, engine_args: {SMALL['engine_args']}}}}}]\n"
    )
    port = free_port()
    command = [sys.executable, "-m", "hacrl", "serve", str(recipe), "ada", "--port", str(port)]
    found = Server(f"http://127.0.0.1:{port}", KEY, folder / "server.log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HACRL_VLLM_API_KEY", KEY)
        with found.log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, process_group=0)
        try:
            wait_until(lambda: answers(f"{found.url}/health"), lambda: process.poll() is None, found.log)
            yield found
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    """Whether somebody answers with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_until(is_so: Callable[[], bool], may_go_on: Callable[[], bool], log: Path) -> None:
    """Ask again and again."""
    deadline = time.monotonic() + START_SECONDS
    while not is_so():
        assert may_go_on(), log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
