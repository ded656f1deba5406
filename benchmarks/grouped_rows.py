"""Decoding in step on a CPU: prompts kept once for all responses to them, against a copy for each.

    python benchmarks/grouped_rows.py
    python benchmarks/grouped_rows.py --work 8x8x180x20 --shape qwen3-60m

Prompts, responses to each, prompt tokens, new tokens; random weights that never stop. Both ways take turns in
one process; medians, and how often the first was the faster one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch
from rollout_work import Work, make_problems
from shapes import SHAPES, make_agent
from tests.support.engines import sample_rollouts
from timing import timed

from hacrl.config.schema import AgentSettings
from hacrl.engines.hf import batch_decoding as decoding
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.models.agent import Agent
from hacrl.types import Sampling

WORK = ("8x8x32x32", "8x8x180x20", "8x8x32x128", "8x8x32x400", "4x16x256x64", "32x2x32x32")


def main() -> None:
    """Every case in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.85m")
    parser.add_argument("--work", type=Work.parse, nargs="+", default=[Work.parse(work) for work in WORK])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_agent(options.shape, Path(folder), torch.float32, "cpu", stops=False)
        agent = Agent.load(AgentSettings(name="agent", model=folder), "cpu")
    print(f"{'work':>14} {'kept once, ms':>14} {'copied, ms':>11} {'ratio':>6} faster in")
    for work in options.work:
        pairs = [measure(agent, work, number) for number in range(options.rounds + 1)][1:]
        once, copied = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
        faster = sum(one < other for one, other in pairs)
        print(
            f"{work.name:>14} {once:14.1f} {copied:11.1f} {copied / once:6.2f} {faster} of {len(pairs)}",
            flush=True,
        )


def measure(agent: Agent, work: Work, seed: int) -> tuple[float, float]:
    """Seconds of both ways, with the same draws."""
    problems = make_problems(agent, work.prompts, work.prompt_tokens, seed)
    engine, sampling = TransformersEngine(agent), Sampling(work.new_tokens)
    can_share_prompts = decoding.can_share_prompts
    found = []
    for is_grouped in (True, False):
        decoding.can_share_prompts = can_share_prompts if is_grouped else lambda model: False
        found.append(timed(lambda: sample_rollouts(engine, problems, work.samples, sampling, seed)))
    decoding.can_share_prompts = can_share_prompts
    return found[0], found[1]


if __name__ == "__main__":
    main()
