"""Seconds of a weight update of hacrl's vLLM engine, with its parts, for agents of a given shape.

    python benchmarks/weight_updates.py --shapes qwen3-0.6b qwen3-4b
    python benchmarks/weight_updates.py --shapes qwen3-tiny --device cpu

As in training: the engine sleeps if learner and engine share a GPU, the agent's weights change, the engine
wakes up, takes them, and proves by log-probabilities that it has them. The first update after the start warms
up and is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rollout_work import make_problems
from shapes import SHAPES, make_agent

from hacrl.config.schema import AgentSettings, VllmSettings
from hacrl.engines.vllm.backend import Backend, IndexedSamples, Request
from hacrl.engines.vllm.engine import VllmEngine
from hacrl.engines.vllm.launch import make_vllm_engine
from hacrl.models.agent import Agent

GIB = 2**30
CONTEXT = 512


@dataclass(frozen=True)
class Update:
    """One update, in seconds."""

    total: float
    waking: float  # memory for weights and for the cache
    transfer: float  # until every worker has put the weights in place
    proof: float  # the engine says a little, the learner computes how likely that was
    sleeping: float  # before it, not part of it: giving the memory back


class Watched:
    """A backend that notes when each call began and ended."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name, self.can_sleep = backend.name, backend.can_sleep
        self.calls: list[tuple[str, float, float]] = []

    def start(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._note("start", self._backend.start)

    def generate(self, asks: Sequence[Request]) -> Iterator[IndexedSamples]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        return self._backend.generate(asks)

    def call(self, method: str, *arguments: str) -> list[Any]:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        results: list[Any] = self._note(method, self._backend.call, method, *arguments)
        return results

    def weight_transfer(self, method: str, request: dict[str, Any] | None = None) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._note("hacrl_load", self._backend.weight_transfer, method, request)

    def reset_prefix_cache(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._note("forget", self._backend.reset_prefix_cache)

    def sleep(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._note("sleep", self._backend.sleep)

    def wake(self, part: str) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._note("wake", self._backend.wake, part)

    def close(self) -> None:
        """See :class:`hacrl.engines.vllm.backend.Backend`."""
        self._backend.close()

    def _note(self, name: str, work: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*arguments)
        finally:
            self.calls.append((name, start, time.perf_counter()))

    def seconds(self, name: str) -> float:
        """In calls of this name."""
        return sum(end - start for call, start, end in self.calls if call == name)

    def ended(self, name: str) -> float:
        """When the last call whose name begins so was over."""
        return max(end for call, _, end in self.calls if call.startswith(name))


def update(engine: VllmEngine, watched: Watched) -> Update:
    """The weights change, and the engine follows."""
    watched.calls.clear()
    engine.sleep()
    sleeping = watched.seconds("sleep")
    with torch.no_grad():
        for parameter in engine.policy.model.parameters():
            parameter.mul_(1.001)
    engine.policy.policy_version += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.sync()
    end = time.perf_counter()
    wakes = [(begun, over) for name, begun, over in watched.calls if name == "wake"]
    first_wake = wakes[0][1] - wakes[0][0] if wakes else 0.0
    return Update(
        total=end - start,
        waking=watched.seconds("wake"),
        transfer=watched.ended("hacrl_load") - start - first_wake,
        proof=end - watched.ended("forget"),
        sleeping=sleeping,
    )


def measure(shape: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start an engine for an agent of this shape, and update it a few times."""
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = make_agent(shape, folder / "agent", dtype, options.device)
    settings = AgentSettings(name="agent", model=str(model), precision=str(dtype).removeprefix("torch."))
    agent = Agent.load(settings, options.device)
    vllm = VllmSettings(python=options.python, memory=options.memory, engine_args=options.engine_args)
    probes = [agent.encode_prompt(problem) for problem in make_problems(agent, 4, 128, seed=0)]
    engine = make_vllm_engine(agent, vllm, probes, CONTEXT, folder / "engine")
    engine.backend = watched = Watched(engine.backend)
    start = time.perf_counter()
    first = engine.sync()
    start_s = time.perf_counter() - start
    updates = [update(engine, watched) for _ in range(options.updates + 1)][1:]
    engine.close()
    median = {
        part: statistics.median(getattr(one, part) for one in updates) for part in Update.__dataclass_fields__
    }
    size = sum(parameter.numel() * parameter.element_size() for parameter in agent.model.parameters())
    return {
        "shape": shape,
        "weight_sync": first.weight_sync,
        "start_s": start_s,
        "gib": size / GIB,
        "gib_per_s": size / GIB / median["transfer"],
        "median_s": median,
        "updates_s": [asdict(one) for one in updates],
    }


def line(found: dict[str, Any]) -> str:
    """For reading."""
    median = found["median_s"]
    totals = ", ".join(f"{one['total']:.3f}" for one in found["updates_s"])
    return (
        f"{found['shape']:12} {found['gib']:6.2f} GiB by {found['weight_sync']}: {median['total']:.3f} s "
        f"(waking {median['waking']:.3f}, "
        f"transfer {median['transfer']:.3f} = {found['gib_per_s']:.1f} GiB/s, "
        f"proof {median['proof']:.3f}); all {totals}; "
        f"sleeping {median['sleeping']:.3f} s; engine ready after {found['start_s']:.1f} s"
    )


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", help="interpreter with vLLM: the engine is then a server")
    parser.add_argument("--updates", type=int, default=5, help="counted ones")
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(shape, options, Path(folder)))
        print(line(found[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
