"""vLLM engines of one size that answer at the same time: what their number changes.

    python benchmarks/vllm_side_by_side.py --shape qwen3-0.6b --engines 1 2
    python benchmarks/vllm_side_by_side.py --shape qwen3-tiny --device cpu --engines 1 --work 16x8x32x64

Engines are started once; numbers of them take turns, round by round, the first of which does not count.
Weights are vLLM's random ones and prompts are random tokens: what is measured is the machinery.
Every engine does all of the work: two that take twice as long as one gain nothing from each other. On a GPU
they compute at the same time only if NVIDIA's MPS daemon runs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from rollout_work import Work
from shapes import SHAPES, make_agent

from hacrl.config.schema import VllmSettings
from hacrl.engines.vllm.backend import Request
from hacrl.engines.vllm.child import ChildBackend
from hacrl.engines.vllm.launch import engine_arguments, engine_environment
from hacrl.types import Sampling


def make_engines(options: argparse.Namespace, model: str, folder: Path) -> list[ChildBackend]:
    """Start the largest number of engines that generate concurrently."""
    work, device = options.work, torch.device(options.device)
    gib = options.kv_cache_gib
    cache = {} if gib is None else {"kv_cache_memory_bytes": int(gib * 2**30)}
    settings = VllmSettings(
        mode="child",
        max_sequences=work.responses,
        engine_args={**cache, **options.engine_args},
    )
    on_cpu = device.type == "cpu"
    longest = work.prompt_tokens + work.new_tokens
    dtype = "float32" if on_cpu else "bfloat16"
    arguments = engine_arguments(model, dtype, settings, longest, on_cpu, can_sleep=False)
    arguments["load_format"] = "dummy"
    engines = []
    for number in range(max(options.engines)):
        log = folder / f"{number}.log"
        environment = engine_environment(device, settings)
        engines.append(ChildBackend(str(number), arguments, environment, False, log, 900.0))
        engines[-1].launch()
    for engine in engines:
        engine.start()
    return engines


def round_of(engines: list[ChildBackend], work: Work, draw: random.Random, vocabulary: int) -> float:
    """Seconds until all engines have answered, each its own new prompts."""
    asks = []
    for _ in engines:
        prompts = [
            tuple(draw.randrange(5, vocabulary) for _ in range(work.prompt_tokens))
            for _ in range(work.prompts)
        ]
        asks.append(
            [
                Request(one, Sampling(work.new_tokens), (), None)
                for one in prompts
                for _ in range(work.samples)
            ]
        )
    answered: list[int] = []

    def answer(engine: ChildBackend, requests: list[Request]) -> None:
        answered.extend(len(sample.token_ids) for ended in engine.generate(requests) for _, sample in ended)

    threads = [
        threading.Thread(target=answer, args=pair, daemon=True) for pair in zip(engines, asks, strict=True)
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    assert answered == [work.new_tokens] * (len(engines) * work.responses), "not all have answered"
    for engine in engines:
        engine.reset_prefix_cache()  # as after an update
    return seconds


def main() -> None:
    """Measure, print medians and speeds beside the first number's, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engines", type=int, nargs="+", default=[2])
    parser.add_argument("--work", type=Work.parse, default=Work.parse("32x8x160x256"))
    parser.add_argument("--kv-cache-gib", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[int, list[float]] = {count: [] for count in options.engines}
    vocabulary = SHAPES[options.shape]["vocab_size"]
    with tempfile.TemporaryDirectory() as name:
        folder, dtype = Path(name), torch.float32 if options.device == "cpu" else torch.bfloat16
        model = str(make_agent(options.shape, folder / "agent", dtype, "cpu", stops=False))
        engines = make_engines(options, model, folder)
        try:
            for number in range(options.rounds + 1):
                for count, rounds in found.items():
                    seconds = round_of(engines[:count], options.work, random.Random(number), vocabulary)
                    if number:
                        rounds.append(seconds)
        finally:
            for engine in engines:
                engine.close()
    tokens = options.work.responses * options.work.new_tokens
    speeds = {count: count * tokens / statistics.median(seconds) for count, seconds in found.items()}
    for count, seconds in found.items():
        print(
            f"engines: {count}, {options.work.name}: "
            f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} - {max(seconds):.3f}), "
            f"{speeds[count]:,.0f} tokens/s, x{speeds[count] / speeds[options.engines[0]]:.3f}"
        )
    if options.json:
        options.json.write_text(json.dumps(list(found.items())) + "\n")


if __name__ == "__main__":
    main()
