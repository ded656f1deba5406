"""Time weight syncs to an engine's copies of a model: in this process, and in processes of their own.

    python benchmarks/replicas.py --hidden 768 --layers 12 --replicas 1 2

A sync copies or broadcasts all trained weights, generates to four prompts on every copy, and compares their
log-probabilities with the learner's. The model is random.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from hacrl.config.schema import AgentSettings
from hacrl.engines.hf.detached import DetachedEngine
from hacrl.engines.replicas import engine as replica_engine
from hacrl.engines.replicas.fleet import FleetSettings
from hacrl.engines.replicas.placement import LocalPlacement
from hacrl.engines.replicas.weight_broadcast import send_weights

PROBES = [tuple(range(3, 3 + length)) for length in (20, 30, 40, 50)]


class Policy:
    """A random model with what an engine needs of an agent."""

    name = "random"
    context_length = 2048
    stop_ids = frozenset({1})

    def __init__(self, hidden: int, layers: int, device: torch.device) -> None:
        config = Qwen3Config(
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            vocab_size=32_000,
            tie_word_embeddings=True,
        )
        self.model: Any = Qwen3ForCausalLM(config).eval().to(device)
        self.device = device
        self.policy_version = 0


def seconds(action: Callable[[], object]) -> float:
    """Return how long the action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


TRANSFERS: list[float] = []  # seconds of each broadcast of all weights


def timed_transfer(*arguments: Any) -> int:
    """Broadcast weights and note how long that takes."""
    start = time.perf_counter()
    sent = send_weights(*arguments)
    TRANSFERS.append(time.perf_counter() - start)
    return sent


def measure(name: str, engine: Any, policy: Policy, repetitions: int) -> None:
    """Print the time of the first sync, and medians of the next ones."""
    TRANSFERS.clear()
    try:
        first, later = seconds(engine.sync), []
        for _ in range(repetitions):
            policy.policy_version += 1
            later.append(seconds(engine.sync))
        broadcast = f"{statistics.median(TRANSFERS[1:]):6.2f} s of it the broadcast" if TRANSFERS else ""
        print(f"{name:18} first {first:6.1f} s   later {statistics.median(later):6.2f} s   {broadcast}")
    finally:
        engine.close()


def main() -> None:
    """Measure with the options of the command line."""
    replica_engine.send_weights = timed_transfer
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    policy = Policy(options.hidden, options.layers, device)
    size = sum(weight.nbytes for weight in policy.model.parameters())
    print(f"{policy.model.num_parameters() / 1e6:.0f} million parameters, {size / 1e6:.0f} MB, {device}")
    measure("in this process", DetachedEngine(policy, PROBES, device), policy, options.repetitions)
    for count in options.replicas:
        with tempfile.TemporaryDirectory() as folder:
            policy.model.config.save_pretrained(Path(folder) / "model")
            settings = FleetSettings(
                agent=AgentSettings(name=policy.name, model=f"{folder}/model", precision="float32"),
                stop_ids=tuple(policy.stop_ids),
                context_length=policy.context_length,
                learner=device,
                devices=(device,) * count,
                max_batch=64,
                compiles=None,
                timeout=600.0,
            )
            engine = replica_engine.ReplicaEngine(policy, PROBES, settings, LocalPlacement(Path(folder)))
            measure(f"{count} process(es)", engine, policy, options.repetitions)


if __name__ == "__main__":
    main()
