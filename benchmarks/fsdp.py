"""Measure what FSDP2 costs on one GPU: one rank of it against the plain learner, on the same samples.

    python benchmarks/fsdp.py                         # Qwen3-0.6B's shape on a GPU
    python benchmarks/fsdp.py --lora 16 --checkpointing
    python benchmarks/fsdp.py --shape qwen3-tiny --device cpu --prompts 2 --updates 2

Random weights, random prompts and responses; nothing is downloaded. Three learners start from the same
weights: the plain one as it is by default, the plain one without compiled layers (FSDP2's are not compiled),
and one rank of FSDP2 over NCCL. Their losses and gradient norms say whether they compute the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from shapes import SHAPES, make_agent

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, FsdpSettings, HacpoSettings, LearningSettings, LoraSettings
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.models.rank_group import Meeting, RankGroup, join, leave, listen
from hacrl.models.sharded_agent import ShardedAgent
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling

GIB = 2**30
METHOD = HacpoSettings(clip_low=0.2, clip_high=0.28)  # wide enough for random weights in 16 bits


@dataclass(frozen=True)
class Figures:
    """Of one learner."""

    learner: str
    seconds_per_update: float  # median over the updates after the first step
    tokens_per_second: float
    peak_gib: float  # of the GPU, while it learns
    resident_gib: float  # of the GPU, before it learns
    losses: list[float]
    grad_norms: list[float]


def make_samples(agent: Agent, args: argparse.Namespace) -> list[LearnerSample]:
    """Return random prompts with random responses, as if the agent had sampled them."""
    draw = random.Random(0)
    vocabulary = agent.model.config.get_text_config().vocab_size

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    sampling, samples = Sampling(args.response_tokens), []
    for _ in range(args.prompts):
        prompt = tokens(args.prompt_tokens)
        lengths = [draw.randint(args.response_tokens // 2, args.response_tokens) for _ in range(args.group)]
        responses = [tokens(length) for length in lengths]
        with torch.no_grad():
            pairs = [(prompt, response) for response in responses]
            logprobs, _ = response_logprobs(agent.model, pairs, sampling, agent.device)
        for response, row in zip(responses, logprobs.tolist(), strict=True):
            known = tuple(row[: len(response)])
            samples.append(
                LearnerSample(
                    prompt_ids=prompt,
                    response_ids=response,
                    behaviour_logprobs=known,
                    behaviour_logprob=sum(known),
                    source_length=len(response),
                    source=agent.name,
                    is_own=True,
                    advantage=draw.gauss(0.0, 1.0),
                )
            )
    return samples


def measure(
    name: str,
    load: Callable[[], Agent],
    samples: list[LearnerSample],
    args: argparse.Namespace,
    **settings: Any,
) -> Figures:
    """Make the updates of a few steps, and return the figures of all steps but the first."""
    given = LearningSettings(
        lr=args.lr, micro_batch_tokens=args.micro_batch_tokens, old_policy="sampler", **settings
    )
    agent = load()
    learner = Learner(agent, make_method(METHOD), given, Sampling(args.response_tokens))
    on_gpu = agent.device.type == "cuda"
    seconds, losses, norms, resident = [], [], [], 0
    for step in range(args.steps + 1):
        if step == 1 and on_gpu:  # the first step compiles and makes the moments
            torch.cuda.reset_peak_memory_stats()
            resident = torch.cuda.memory_allocated()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        stats = learner.learn(samples, updates=args.updates, seed=step)
        if on_gpu:
            torch.cuda.synchronize()
        if step:
            seconds.append((time.perf_counter() - start) / args.updates)
        losses += stats.losses
        norms += stats.grad_norms
        for note in stats.notes:
            print(f"{name}: {note}")
    tokens = sum(len(sample.prompt_ids) + len(sample.response_ids) for sample in samples)
    return Figures(
        learner=name,
        seconds_per_update=median(seconds),
        tokens_per_second=tokens / args.updates / median(seconds),
        peak_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        resident_gib=resident / GIB,
        losses=losses,
        grad_norms=norms,
    )


def free_memory() -> None:
    """Give the memory of the last learner back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Measure all learners and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--updates", type=int, default=4, help="in a step")
    parser.add_argument("--steps", type=int, default=3, help="that are measured, after one that is not")
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: train all weights")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--cpu-offload", action="store_true")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    precision = "float32" if args.device == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        make_agent(args.shape, Path(folder), getattr(torch, precision), "cpu")
        plain = AgentSettings(
            name="big",
            model=folder,
            precision=precision,
            gradient_checkpointing=args.checkpointing,
            lora=LoraSettings(rank=args.lora, alpha=2.0 * args.lora) if args.lora else None,
        )
        sharded = replace(plain, fsdp=FsdpSettings(cpu_offload=args.cpu_offload))
        samples = make_samples(Agent.load(plain, args.device), args)
        found = []
        for name, compiles in (("plain", None), ("plain, not compiled", False)):
            free_memory()
            load = lambda: Agent.load(plain, args.device)  # noqa: E731
            found.append(measure(name, load, samples, args, compile=compiles))
        free_memory()
        meeting = Meeting("127.0.0.1", 0, 0, 1)
        store = listen(meeting, 60.0)
        join(store, meeting, args.device, 600.0)
        group = RankGroup("big", torch.distributed.group.WORLD, store, has_followers=False)
        load = lambda: ShardedAgent.load_shards(sharded, args.device, group)  # noqa: E731
        found.append(measure("FSDP2, one rank", load, samples, args))
        leave()
    report(found, args)


def report(found: list[Figures], args: argparse.Namespace) -> None:
    """Print a table, and how far the losses are apart."""
    print(f"{'learner':<22}{'s/update':>10}{'tokens/s':>12}{'peak GiB':>10}{'before GiB':>12}")
    for figures in found:
        print(
            f"{figures.learner:<22}{figures.seconds_per_update:>10.3f}{figures.tokens_per_second:>12,.0f}"
            f"{figures.peak_gib:>10.2f}{figures.resident_gib:>12.2f}"
        )
    print(f"losses from {found[1].losses[0]:.4f} to {found[1].losses[-1]:.4f}")
    reference = found[1]
    for figures in (found[0], found[2]):
        losses = max(abs(a - b) for a, b in zip(figures.losses, reference.losses, strict=True))
        norms = max(
            abs(a - b) / max(b, 1e-12) for a, b in zip(figures.grad_norms, reference.grad_norms, strict=True)
        )
        print(
            f"{figures.learner} against {reference.learner}: losses differ by {losses:.2e} at most,", end=" "
        )
        print(f"gradient norms by {norms:.2%}; {len(reference.losses)} updates")
    if args.out is not None:
        args.out.write_text(json.dumps([asdict(figures) for figures in found], indent=1))


if __name__ == "__main__":
    main()
