"""What episodes in processes cost: time to start one and to act, and memory, with many in flight.

    python benchmarks/environment_pool.py [--episodes 256] [--acts 20] [--imports numpy,torch]

The environment does nothing, so all that is measured is the pool's own. ``--imports`` are modules that the
environment's file imports, as large ones do. Memory is the proportional set size: pages that processes share
count once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from hacrl.environments.interface import EnvironmentLimits, Outcome
from hacrl.environments.pool import EnvironmentPool
from hacrl.types import Problem, ToolCall, Turn

MARK = "HACRL_BENCHMARK_MARK"
ENVIRONMENT = '''
class Counter:
    def reset(self, **row):
        self.count = 0
        return "Count."

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: how much
        """
        self.count += number
        return self.count

    def get_reward(self):
        return float(self.count)
'''
ACTION = Turn("assistant", "", (ToolCall("add", '{"number": 1}'),))


def main() -> None:
    """Print a table of times and memory."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=256, help="in flight at once")
    parser.add_argument("--acts", type=int, default=20, help="per episode")
    parser.add_argument("--imports", default="", help="modules that the environment imports")
    arguments = parser.parse_args()
    os.environ[MARK] = str(os.getpid())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counter.py"
        imports = "".join(f"import {name}\n" for name in arguments.imports.split(",") if name)
        path.write_text(imports + ENVIRONMENT)
        with EnvironmentPool(f"{path}:Counter", EnvironmentLimits()) as pool:
            measure(pool, arguments.episodes, arguments.acts)
            began = time.perf_counter()
        print(f"close: {time.perf_counter() - began:.2f} s; processes left: {len(processes())}")


def measure(pool: EnvironmentPool, episodes: int, acts: int) -> None:
    """Play so many episodes at once."""
    began = time.perf_counter()
    pool.check()
    print(f"import and describe: {time.perf_counter() - began:.2f} s; memory {memory():.0f} MiB")
    cpu = cpu_seconds()
    began = time.perf_counter()
    for key in range(episodes):
        pool.start(key, Problem(f"problem {key}", "Count to three.", "3"))
    collect(pool, episodes)
    report("start", began, episodes, cpu_seconds() - cpu)
    found = processes()
    print(f"{len(found)} processes; memory {memory():.0f} MiB")
    rounds = []
    cpu = cpu_seconds()
    began = time.perf_counter()
    for _ in range(acts):
        round_began = time.perf_counter()
        for key in range(episodes):
            pool.act(key, ACTION)
        collect(pool, episodes)
        rounds.append(1000 * (time.perf_counter() - round_began) / episodes)
    report("act", began, episodes * acts, cpu_seconds() - cpu)
    print(f"per round: median {statistics.median(rounds):.2f} ms, slowest {max(rounds):.2f} ms an act")
    print(f"{len(processes())} processes; memory {memory():.0f} MiB")
    began = time.perf_counter()
    for key in range(episodes):
        pool.finish(key)
    outcomes = collect(pool, episodes)
    report("finish", began, episodes)
    assert {outcome.reward for outcome in outcomes} == {float(acts)}


def collect(pool: EnvironmentPool, count: int) -> list[Outcome]:
    """Return so many outcomes, none of which may be a failure."""
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        outcomes += [outcome for _, outcome in pool.wait()]
    failures = {outcome.failure for outcome in outcomes}
    if failures != {""}:
        raise SystemExit(f"episodes failed: {failures}")
    return outcomes


def report(what: str, began: float, count: int, cpu: float | None = None) -> None:
    """Print the time per call, and the CPU time of all processes."""
    seconds = time.perf_counter() - began
    more = "" if cpu is None else f", {1000 * cpu / count:.2f} ms of CPU time each"
    print(f"{what}: {1000 * seconds / count:.2f} ms each ({count} in {seconds:.2f} s){more}")


def cpu_seconds() -> float:
    """Return the CPU time that this process and the pool's processes have used."""
    used = time.process_time()
    for pid in processes():
        with suppress(OSError):
            used += int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[0]) / 1e9
    return used


def processes() -> list[int]:
    """Return the processes that the pool has started."""
    found = []
    mark = f"{MARK}={os.getpid()}".encode()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
    return found


def memory() -> float:
    """Return the proportional set size of the pool's processes in MiB."""
    total = 0
    for pid in processes():
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


if __name__ == "__main__":
    main()
