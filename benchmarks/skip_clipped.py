"""What it saves to leave clipped responses out of the backward pass, and that it changes no gradient.

    python benchmarks/skip_clipped.py --device cpu --shape qwen3-60m --prompts 4 --new-tokens 64
    python benchmarks/skip_clipped.py --shape qwen3-0.6b --prompts 32 --new-tokens 1024

One learner with HACPO: its own responses, and as many of a partner, of which a given share is clipped. Every
round makes one update with each value of learning.skip_zero_gradient, from the same responses and weights, so
ratios are of one run. Gradients are compared with those of "never". On a CPU, seconds are processor time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from shapes import SHAPES, make_agent
from timing import timed

from hacrl.algorithms.methods import make_method
from hacrl.config.schema import AgentSettings, HacpoSettings, LearningSettings
from hacrl.models.agent import Agent
from hacrl.models.logprobs import response_logprobs
from hacrl.training.batching import micro_batches, token_pairs
from hacrl.training.learn_stats import LearnStats
from hacrl.training.learner import Learner
from hacrl.types import LearnerSample, Sampling

MODES = ("never", "always", "auto")
INSIDE, CLIPPED = 0.95, 0.4  # ratios of a partner's responses; the clip interval is [0.8, 1]
UNCHANGING = 1e-30  # learning rate
MOST_COMPARED = 2**24  # numbers of a gradient


@dataclass(frozen=True)
class Found:
    """One share of clipped responses: seconds of every round, and how far gradients are from never's."""

    clipped: float
    seconds: dict[str, list[float]]
    spared: dict[str, float]  # share of all responses that had no backward pass
    difference: dict[str, float]  # largest, as a share of the largest gradient


class Measured:
    """A learner that makes the same update again and again."""

    def __init__(self, agent: Agent, options: argparse.Namespace, mode: str) -> None:
        settings = LearningSettings(
            lr=UNCHANGING,
            micro_batch_tokens=options.micro_batch_tokens,
            skip_zero_gradient=mode,
            measure_alignment=False,
            max_grad_norm=1e9,
        )
        method = make_method(HacpoSettings(delta=0.2))
        exact = agent.model.dtype == torch.float32
        self.learner = Learner(agent, method, settings, Sampling(options.new_tokens), exact_sampler=exact)
        self.gradient = torch.empty(0)
        self.stats = LearnStats()

    def update(self, given: Sequence[LearnerSample]) -> float:
        """Make one update; return its seconds."""

        def learn() -> None:
            self.stats = self.learner.learn(given, 1, seed=0)

        if self.learner.agent.device.type != "cpu":
            return timed(learn)
        start = time.process_time()
        learn()
        return time.process_time() - start

    def keep_gradient(self, given: Sequence[LearnerSample]) -> None:
        """Make one update that is not timed, and keep its gradient."""
        optimizer = self.learner.optimizer
        clip = optimizer.clip_gradients

        def keep(max_norm: float) -> float:
            self.gradient = optimizer.sampled_gradients(MOST_COMPARED).float().cpu()
            return clip(max_norm)

        optimizer.clip_gradients = keep  # type: ignore[method-assign]
        self.update(given)
        optimizer.clip_gradients = clip  # type: ignore[method-assign]


def samples(agent: Agent, options: argparse.Namespace, clipped: float) -> list[LearnerSample]:
    """Return responses of random tokens: own ones at ratio 1, and a partner's, a share of them clipped."""
    draw = random.Random(0)
    vocabulary = SHAPES[options.shape]["vocab_size"]

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.choices(range(4, vocabulary), k=count))

    made = []
    for _ in range(options.prompts):
        prompt = tokens(options.prompt_tokens)
        for is_own in (True, False):
            for number in range(options.samples):
                response = tokens(draw.randint(options.new_tokens // 2, options.new_tokens))
                made.append(_sample(prompt, response, is_own, 1.0 if number % 2 else -1.0))
    others = [number for number, sample in enumerate(made) if not sample.is_own]
    far = set(draw.sample(others, round(clipped * len(others))))
    found: dict[int, LearnerSample] = {}
    numbers = {id(sample): number for number, sample in enumerate(made)}
    for micro_batch in micro_batches(made, options.micro_batch_tokens):
        with torch.no_grad():
            rows, _ = response_logprobs(
                agent.model, token_pairs(micro_batch), Sampling(options.new_tokens), agent.device
            )
        for sample, row in zip(micro_batch, rows.tolist(), strict=True):
            number = numbers[id(sample)]
            ratio = 1.0 if sample.is_own else CLIPPED if number in far else INSIDE
            found[number] = _at_ratio(sample, row, ratio)
    return [found[number] for number in range(len(made))]


def _sample(
    prompt: tuple[int, ...], response: tuple[int, ...], is_own: bool, advantage: float
) -> LearnerSample:
    source = "agent" if is_own else "partner"
    return LearnerSample(prompt, response, None, 0.0, len(response), source, is_own, advantage)


def _at_ratio(sample: LearnerSample, logprobs: Sequence[float], ratio: float) -> LearnerSample:
    """Return the sample with the source's log-probabilities at this ratio to the learner's."""
    behaviour = tuple(value - math.log(ratio) for value in logprobs[: len(sample.response_ids)])
    return LearnerSample(
        sample.prompt_ids,
        sample.response_ids,
        behaviour,
        math.fsum(behaviour),
        sample.source_length,
        sample.source,
        sample.is_own,
        sample.advantage,
    )


def measure(agent: Agent, options: argparse.Namespace, clipped: float) -> Found:
    """Return times and gradients with one share of clipped responses."""
    given = samples(agent, options, clipped)
    measured = {mode: Measured(agent, options, mode) for mode in MODES}
    for one in measured.values():
        for _ in range(2):  # auto measures in its first update
            one.update(given)
        one.keep_gradient(given)
    expected = measured["never"].gradient
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(options.rounds):
        for mode in MODES if number % 2 else reversed(MODES):
            seconds[mode].append(measured[mode].update(given))
    return Found(
        clipped,
        seconds,
        {mode: one.stats.screened_out / len(given) for mode, one in measured.items()},
        {
            mode: float((one.gradient - expected).abs().max() / expected.abs().max())
            for mode, one in measured.items()
        },
    )


def main() -> None:
    """Measure, print a table, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-0.6b")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--threads", type=int, help="of the CPU")
    add("--prompts", type=int, default=16)
    add("--samples", type=int, default=8, help="responses of each agent to a prompt")
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=512, help="of the longest response; the shortest has half of it")
    add("--micro-batch-tokens", type=int, default=4096)
    add("--clipped", type=float, nargs="+", default=[0.0, 0.5, 0.9, 1.0], help="of the partner's responses")
    add("--rounds", type=int, default=5)
    add("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = options.device != "cpu"
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = make_agent(options.shape, Path(folder) / "agent", dtype, options.device)
        agent = Agent.load(AgentSettings(name="agent", model=str(model)), options.device)
    found = []
    print("clipped  mode    seconds (lowest - highest)    never / it    spared    gradients differ by")
    for clipped in options.clipped:
        one = measure(agent, options, clipped)
        found.append(one)
        for mode in MODES:
            ratios = [a / b for a, b in zip(one.seconds["never"], one.seconds[mode], strict=True)]
            times = one.seconds[mode]
            print(
                f"{clipped:7.0%}  {mode:6}"
                f"  {statistics.median(times):7.3f} ({min(times):.3f} - {max(times):.3f})"
                f"    {statistics.median(ratios):5.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
                f"    {one.spared[mode]:6.1%}    {one.difference[mode]:.1e}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found]) + "\n")


if __name__ == "__main__":
    main()
