"""A cluster of two nodes, each started by ``ray start``; the node of one agent is killed and comes back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import ray
from ray.util import get_node_ip_address

from hacrl.config.schema import CheckpointSettings, PlaceSettings, RaySettings, RunConfig
from hacrl.runs.run import LocalRun, run_locally
from hacrl.training.observer import Observer, Phase
from tests.support.chaos import chaos_config, differing_files

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
# A dead node is noticed after a second and a half, not after the usual fifteen.
ENVIRONMENT = {
    **os.environ,
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass
class TwoNodes:
    """A head, which has room for one agent, and a second node, which has room for the other."""

    folder: Path
    port: int
    environment: Mapping[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{get_node_ip_address()}:{self.port}"

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*RAY, "start", "--block", "--disable-usage-stats", *arguments]
        with (self.folder / f"node-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def start_head(self) -> None:
        where = [f"--port={self.port}", "--include-dashboard=false"]
        self.start("--head", *where, "--num-cpus=2", '--resources={"first": 1}')
        deadline = time.monotonic() + 120
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((get_node_ip_address(), self.port)) == 0:
                    return
            assert time.monotonic() < deadline, (self.folder / "node-0.log").read_text()
            time.sleep(0.2)

    def start_second(self) -> None:
        self.second = self.start(
            f"--address={self.address}",
            "--num-cpus=2",
            '--resources={"second": 1}',
        )

    def kill_second(self) -> None:
        """Kill all processes of the second node, the agents' included."""
        for pid in _descendants(self.second.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.second.wait()

    def end(self) -> None:
        for process in reversed(self.processes):
            for pid in _descendants(process.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.wait()


def _descendants(pid: int) -> list[int]:
    """Return a process and all that it started, children first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended meanwhile
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found[::-1]


@contextmanager
def started(folder: Path, environment: Mapping[str, str]) -> Iterator[TwoNodes]:
    """Start the head; end all nodes after the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = TwoNodes(folder, port, environment)
    try:
        nodes.start_head()
        yield nodes
    finally:
        ray.shutdown()
        nodes.end()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TwoNodes]:
    with started(tmp_path, ENVIRONMENT) as nodes:
        nodes.start_second()
        yield nodes


JOIN = """
import sys
from hacrl.config.load import build_config
from hacrl.executors.ray.cluster import Cluster
agents = [{"name": "small", "model": "bundled:qwen-small-a"}]
config = build_config({"output": "x", "executor": "ray", "ray": {"address": sys.argv[1]}, "agents": agents})
print("hosts:", *sorted(Cluster(config).hosts))
"""


@pytest.mark.parametrize("has_token", [True, False])
def test_a_cluster_that_asks_for_a_token(tmp_path: Path, has_token: bool) -> None:
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef" * 4)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    plain["HOME"] = str(tmp_path)  # no token of this machine's user
    with_token = {**plain, "RAY_AUTH_TOKEN_PATH": str(secret)}
    with started(tmp_path, {**with_token, "RAY_AUTH_MODE": "token"}) as nodes:
        command = [sys.executable, "-c", JOIN, nodes.address]
        environment = with_token if has_token else plain
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if has_token:
        assert f"hosts: {get_node_ip_address()}" in found.stdout, found.stderr
    else:
        assert "does this machine have its token" in found.stderr


class NodeKiller(Observer):
    """Kills the second node when a phase begins, and starts it again a second later."""

    def __init__(self, nodes: TwoNodes, moments: list[tuple[int, Phase]]) -> None:
        self.nodes = nodes
        self.waiting = moments
        self.notes: list[str] = []
        self.lost_at = 0.0
        self.seconds: list[float] = []  # from each kill to the next sign of life of the agent

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        if agent != "llama":
            return
        if self.lost_at:
            self.seconds.append(time.monotonic() - self.lost_at)
            self.lost_at = 0.0
        if (step, phase) in self.waiting:
            self.waiting.remove((step, phase))
            self.lost_at = time.monotonic()
            self.nodes.kill_second()
            threading.Timer(1.0, self.nodes.start_second).start()

    def on_note(self, step: int, note: str) -> None:
        self.notes.append(note)


def config(folder: Path, nodes: TwoNodes) -> RunConfig:
    base = chaos_config(folder, 3)
    places = {"small": "first", "llama": "second"}
    agents = tuple(
        replace(agent, place=PlaceSettings(resources={places[agent.name]: 1})) for agent in base.agents
    )
    return replace(
        base,
        agents=agents,
        executor="ray",
        ray=RaySettings(address=nodes.address, placement_timeout=120.0),
        checkpoint=CheckpointSettings(every=2, background=False),
    )


def test_a_node_killed_while_sampling_learning_and_saving(tmp_path: Path, cluster: TwoNodes) -> None:
    run_locally(chaos_config(tmp_path / "calm", 3))
    killer = NodeKiller(cluster, [(1, "rollout"), (3, "learn"), (3, "save")])
    with LocalRun(config(tmp_path / "run", cluster), [killer]) as run:
        run.train()
        run.save()
    assert killer.waiting == []
    assert len([note for note in killer.notes if "agent 'llama' is rebuilt from" in note]) == 3
    # also the rollouts: what was in the log was not sampled again, the rest came out the same
    assert differing_files(tmp_path / "calm", tmp_path / "run") == []
    print("seconds from a node's death to the agent's next phase:", [round(one, 1) for one in killer.seconds])
