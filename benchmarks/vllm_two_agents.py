"""Two agents of different architecture and tokenizer, each with its own vLLM engine, trained together.

    python benchmarks/vllm_two_agents.py --shapes qwen3-0.6b llama-0.5b --steps 20
    python benchmarks/vllm_two_agents.py --device cpu --python .venv-vllm/bin/python  # tiny ones

Weights are random, so the reward is a number that differs between responses and means nothing: what is
measured is the machinery. Prints, per agent, tokens per second of generation, seconds of a weight update
(waking up and the proof by log-probabilities included), the proof's gap, the gap over a step's own responses,
and the memory of the device at its peak and between rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, make_agent, prompts

from hacrl.config.load import build_config
from hacrl.runs.run import LocalRun
from hacrl.tasks.rewards import RewardTask
from hacrl.training.metrics import StepReport
from hacrl.training.observer import Observer, Phase
from hacrl.types import VerifiedRollout

GIB = 2**30


def meaningless(completions: list[str], **_: Any) -> list[float]:
    """A number between 0 and 1 that responses differ in."""
    return [sum(map(ord, text)) % 7 / 6 for text in completions]


class Watch(Observer):
    """What happened, and how full the device was in every phase."""

    def __init__(self, on_gpu: bool) -> None:
        self.steps: list[tuple[StepReport, dict[str, float]]] = []
        self.tokens: dict[tuple[int, str], int] = {}
        self.peaks: dict[str, int] = {}
        self._phase = "start"
        self._stop = threading.Event()
        if on_gpu:
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            free, total = torch.cuda.mem_get_info()
            self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), total - free)

    def on_phase(self, step: int, phase: Phase, agent: str) -> None:
        """Remember whose memory it is from now on."""
        self._phase = f"{phase}/{agent}" if step else "start"

    def on_rollouts(self, step: int, agent: str, rollouts: Sequence[VerifiedRollout]) -> None:
        """Count tokens."""
        self.tokens[step, agent] = sum(one.rollout.num_tokens for one in rollouts)

    def on_step(self, report: StepReport, seconds: Mapping[str, float]) -> None:
        """Print a line."""
        self.steps.append((report, dict(seconds)))
        parts = [
            f"{name}: gap {agent.engine.logprob_gap if agent.engine else 0:.2g} "
            f"sync {seconds.get(f'sync/{name}', 0):.2f} s rollout {seconds[f'rollout/{name}']:.2f} s "
            f"learn {seconds[f'learn/{name}']:.2f} s"
            for name, agent in report.agents.items()
        ]
        print(f"step {report.step}  {'  '.join(parts)}", flush=True)

    def on_end(self) -> None:
        """Look no longer."""
        self._stop.set()


def main() -> None:
    """Train, print a table, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-tiny", "llama-tiny"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", help="interpreter with vLLM: engines are then servers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-letters", type=int, default=384)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--lora", type=int, help="rank of adapters; without it all weights are trained")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        agents = [
            {"name": name, "model": str(make_agent(name, Path(folder) / name, dtype, options.device, seed))}
            for seed, name in enumerate(options.shapes)
        ]
        vllm = {
            "memory": options.memory,
            "sleep": on_gpu,
            "max_sequences": options.prompts * options.samples,
            "engine_args": options.engine_args,
            **({} if options.python is None else {"python": options.python}),
        }
        lora = {} if options.lora is None else {"lora": {"rank": options.lora, "alpha": 2.0 * options.lora}}
        config = build_config(
            {
                "agents": agents,
                "agent_defaults": {"engine": "vllm", "vllm": vllm, **lora},
                "checkpoint": {"every": options.checkpoint_every},
                "output": str(Path(folder) / "run"),
                "device": options.device,
                "steps": options.steps,
                "method": {"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05},
                "rollout": {
                    "prompts_per_step": options.prompts,
                    "rollouts_per_prompt": options.samples,
                    "max_new_tokens": options.new_tokens,
                },
                "learning": {"lr": 1e-6, "micro_batch_tokens": options.micro_batch_tokens},
            }
        )
        rows = [{"prompt": text} for text in prompts(options.prompts * options.steps, options.prompt_letters)]
        watch = Watch(on_gpu)
        start = time.perf_counter()
        with LocalRun(config, [watch], task=RewardTask(functions=meaningless, train=rows)) as run:
            run.train()
            stalled = run.checkpoint_stalls
        print(f"{options.steps} steps in {time.perf_counter() - start:.0f} s, engines' start included")
    found = {**summary(watch, options.shapes), "checkpoint_stall_s": stalled}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


def summary(watch: Watch, names: Sequence[str]) -> dict[str, Any]:
    """Medians over the steps after the first, which starts the engines."""
    later = watch.steps[1:]
    found: dict[str, Any] = {
        "memory_gib": {phase: round(peak / GIB, 1) for phase, peak in sorted(watch.peaks.items())},
        "step_s": statistics.median(seconds["whole"] for _, seconds in later),
    }
    for name in names:
        engines = [report.agents[name].engine for report, _ in later]
        gaps = [engine.logprob_gap for engine in engines if engine is not None]
        own = [report.agents[name].learning.sampler_gap for report, _ in later]
        found[name] = {
            "weight_sync": engines[-1].weight_sync if engines[-1] else None,
            "sync_s": statistics.median(seconds[f"sync/{name}"] for _, seconds in later),
            "learn_s": statistics.median(seconds[f"learn/{name}"] for _, seconds in later),
            "tokens_per_s": statistics.median(
                watch.tokens[report.step, name] / seconds[f"rollout/{name}"] for report, seconds in later
            ),
            "agreement_gap_max": max(gaps),
            "own_rollout_gap_max": max(gap for gap in own if gap is not None),
            "policy_versions": [engine.policy_version for engine in engines if engine is not None][-1],
        }
    return found


if __name__ == "__main__":
    main()
