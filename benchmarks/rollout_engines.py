"""Tokens per second of the transformers engine and the vLLM engine: same agent, same prompts, one run.

    python benchmarks/rollout_engines.py --shape qwen3-0.6b --device cuda
    python benchmarks/rollout_engines.py --shape qwen3-tiny --device cpu --python .venv-vllm/bin/python

Every round has new prompts, so that no cached prefix helps; the first one warms both engines up and is not
counted. A random model hardly ever stops, so that all responses have full length.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from shapes import SHAPES, make_agent, prompts

from hacrl.agents.agent import Agent
from hacrl.agents.engine_settings import VllmSettings
from hacrl.agents.settings import AgentSettings
from hacrl.rollout.engine import RolloutEngine
from hacrl.rollout.transformers_engine import TransformersEngine
from hacrl.rollout.vllm.launch import make_vllm_engine
from hacrl.types import Problem, Sampling


def tokens_per_second(
    engine: RolloutEngine, rounds: list[list[Problem]], samples: int, sampling: Sampling
) -> list[float]:
    """Speed of each round but the first."""
    speeds = []
    for number, problems in enumerate(rounds):
        start = time.perf_counter()
        rollouts = engine.generate(problems, samples, sampling, seed=number)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        speeds.append(sum(rollout.num_tokens for rollout in rollouts) / (time.perf_counter() - start))
    return speeds[1:]


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", help="interpreter with vLLM: the engine is then a server")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--prompt-letters", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=float, default=0.3)
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    on_cpu = options.device == "cpu"
    asked = prompts((options.rounds + 1) * options.prompts, options.prompt_letters)
    problems = [Problem(str(number), text, "") for number, text in enumerate(asked)]
    rounds = [problems[i : i + options.prompts] for i in range(0, len(problems), options.prompts)]
    sampling = Sampling(options.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        model = make_agent(
            options.shape, Path(folder) / "agent", torch.float32 if on_cpu else torch.bfloat16, options.device
        )
        agent = Agent.load(AgentSettings(name="agent", model=str(model)), options.device)
        longest = max(len(agent.encode_prompt(problem)) for problem in problems) + options.new_tokens
        vllm = make_vllm_engine(
            agent,
            VllmSettings(
                python=options.python,
                memory=options.memory,
                sleep=False,
                max_sequences=options.prompts * options.samples,
                engine_args=options.engine_args,
            ),
            problems[:4],
            longest,
            Path(folder) / "engine",
        )
        start = time.perf_counter()
        report = vllm.prepare()
        print(f"vLLM ready after {time.perf_counter() - start:.1f} s; {report}", flush=True)
        speeds = {}
        for name, engine in (("vllm", vllm), ("transformers", TransformersEngine(agent, max_batch=1024))):
            speeds[name] = tokens_per_second(engine, rounds, options.samples, sampling)
            print(f"{name}: {', '.join(f'{speed:,.0f}' for speed in speeds[name])} tokens/s", flush=True)
        vllm.close()
    ratio = max(speeds["vllm"]) / max(speeds["transformers"])
    print(f"vllm / transformers: {ratio:.2f}")
    if options.json:
        options.json.write_text(json.dumps({"shape": options.shape, "tokens_per_second": speeds}) + "\n")


if __name__ == "__main__":
    main()
