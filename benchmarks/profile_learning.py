"""Where the time of an update goes: kernels by kind, and how long the device waited for Python.

    python benchmarks/profile_learning.py --shape qwen3-0.6b --prompts 7 --samples 8 --new-tokens 256
    python benchmarks/profile_learning.py --shape qwen3-tiny --device cpu

One learner, random tokens, responses that share prompts; updates before the profiled one are warm-up. On a
GPU the kinds are those of the kernels that ran, on a CPU those of torch's operators.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from shapes import SHAPES, make_agent
from timing import synchronize, timed
from torch.profiler import ProfilerActivity, profile

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, GspoSettings, LearningSettings
from hacrl.models.agent import Agent
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling

WARM_UP = 3
KINDS = {  # the first whose word is in a kernel's name
    "shared prompts": ("sum_copies", "index_select", "indexselect"),
    "logits": ("logsumexp",),
    "compiled": ("triton_",),  # before all whose words may be in the name of what was fused
    "attention": ("_tree_", "flash", "attention", "fmha"),
    "matrix products": ("gemm", "matmul", "nvjet", "cutlass", "addmm", "::mm", "::bmm", "cublas", "splitk"),
    "gather and scatter": ("index", "scatter", "gather", "sort", "embedding"),
    "optimizer": ("adam", "foreach", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy_", "::copy", "::to", "::fill", "::zero"),
}


@dataclass(frozen=True)
class Found:
    """Milliseconds of one update."""

    whole: float
    kinds: dict[str, float]
    longest: dict[str, float]  # the kernels that took most

    @property
    def waiting(self) -> float:
        """When the device had nothing to do."""
        return self.whole - sum(self.kinds.values())


def samples(options: argparse.Namespace, vocabulary: int) -> list[LearnerSample]:
    """Responses of random tokens, good and bad in turn."""
    draw = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(4, vocabulary), k=count))

    made = []
    for _ in range(options.prompts):
        prompt = tokens(options.prompt_tokens)
        for number in range(options.samples):
            length = draw.randint(options.new_tokens // 2, options.new_tokens)
            made.append(
                LearnerSample(
                    prompt_ids=prompt,
                    response_ids=tokens(length),
                    behaviour_logprobs=(-1.0,) * length,
                    behaviour_logprob=-1.0 * length,
                    source_length=length,
                    source="agent",
                    is_own=True,
                    advantage=1.0 if number % 2 else -1.0,
                )
            )
    return made


def kind_of(name: str) -> str:
    """Of a kernel or an operator."""
    lower = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "others")


def profiled(learner: Learner, given: Sequence[LearnerSample], on_gpu: bool) -> Found:
    """One update under the profiler; its time is taken from another one, which nobody watches."""
    for number in range(WARM_UP):
        learner.learn(given, 1, seed=number)
    whole = timed(lambda: learner.learn(given, 1, seed=WARM_UP))
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as record:
        learner.learn(given, 1, seed=WARM_UP + 1)
        synchronize()
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in record.key_averages():
        if on_gpu and event.device_type.name != "CUDA":
            continue
        spent = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1000
        kinds[kind_of(event.key)] = kinds.get(kind_of(event.key), 0.0) + spent
        names[event.key] = names.get(event.key, 0.0) + spent
    longest = dict(sorted(names.items(), key=lambda one: -one[1])[:24])
    return Found(1000 * whole, kinds, longest)


def main() -> None:
    """Profile, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--prompts", type=int, default=7)
    add("--samples", type=int, default=8, help="responses to a prompt")
    add("--prompt-tokens", type=int, default=160)
    add("--new-tokens", type=int, default=256, help="of the longest response; the shortest has half of it")
    add("--micro-batch-tokens", type=int, default=16384)
    add("--json", type=Path)
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = make_agent(options.shape, Path(folder) / "agent", dtype, options.device)
        agent = Agent.load(AgentSettings(name="agent", model=str(model)), options.device)
    settings = LearningSettings(micro_batch_tokens=options.micro_batch_tokens)
    learner = Learner(
        agent,
        make_method(GspoSettings()),
        settings,
        Sampling(options.new_tokens),
        exact_sampler=dtype == torch.float32,
    )
    given = samples(options, SHAPES[options.shape]["vocab_size"])
    found = profiled(learner, given, on_gpu)
    print(f"an update from {len(given)} responses: {found.whole:.1f} ms")
    for kind, spent in sorted(found.kinds.items(), key=lambda one: -one[1]):
        print(f"{kind:20} {spent:9.2f} ms {spent / found.whole:6.1%}")
    print(f"{'nothing':20} {found.waiting:9.2f} ms {found.waiting / found.whole:6.1%}")
    for name, spent in found.longest.items():
        print(f"{spent:9.2f} ms  {name[:120]}")
    if options.json:
        options.json.write_text(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
