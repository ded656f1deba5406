"""What a step costs as agents are added: rollouts, learning, and the bookkeeping of collaboration.

    python benchmarks/many_agents.py [--agents 1 2 4 8] [--steps 3] [--json FILE]

Small agents with random weights and two tokenizers in turn are trained by HACPO for a few steps, each number
of agents without a cap on others' responses and with learning.max_cross_rollouts = G. CPU seconds of this
process, so that other processes matter little; medians over the steps after the first. Bookkeeping is all of
a step that is neither rollouts (with verdicts) nor updates: exchange, capabilities, advantages, retokenising,
samples, reports, files. Then the bookkeeping of a step of real size, on made-up responses, without models.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from shapes import letter_tokenizer, make_agent, prompts
from transformers.utils import logging

from hacrl.algorithms.capability import CapabilityTracker
from hacrl.algorithms.methods import make_method
from hacrl.config.load import build_config
from hacrl.config.schema import HacpoSettings
from hacrl.models.retokenizing import Retokeniser
from hacrl.models.tokenizing import TextCodec
from hacrl.rollouts.groups import group_by_prompt
from hacrl.runs.run import LocalRun
from hacrl.tasks.rewards import RewardTask
from hacrl.training.learn_stats import LearnStats
from hacrl.training.learner import Learner
from hacrl.training.metrics import learn_report, rollout_report
from hacrl.training.samples import SampleBuilder
from hacrl.training.trainer import Trainer
from hacrl.types import Problem, Rollout, Verdict, VerifiedRollout

SHAPES = ("qwen3-tiny", "llama-tiny")
BESIDE = " beside"  # in another thread than the main one


@dataclass(frozen=True)
class StepCost:
    """CPU seconds of one step of n agents."""

    agents: int
    cap: int | None
    rollout: float
    learning: float
    building: float  # of bookkeeping: samples, with retokenising
    bookkeeping: float

    @property
    def share(self) -> float:
        """Of bookkeeping in the step."""
        return self.bookkeeping / (self.rollout + self.learning + self.bookkeeping)


class Clock:
    """CPU seconds spent in wrapped functions, call by call; those of other threads apart."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def wrap(self, owner: Any, name: str) -> None:
        """Count the time in ``owner.name`` from now on."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args: Any, **options: Any) -> Any:
            is_beside = threading.current_thread() is not threading.main_thread()
            clock = time.thread_time if is_beside else time.process_time
            key = name + BESIDE if is_beside else name
            start = clock()
            try:
                return inner(*args, **options)
            finally:
                self.spent[key] = self.spent.get(key, 0.0) + clock() - start

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """What was spent since the last time."""
        spent, self.spent = self.spent, {}
        return spent


def some_reward(completions: list[str], **_: Any) -> list[float]:
    """Right or wrong, for no reason."""
    return [float(sum(map(ord, text)) % 2) for text in completions]


def train(models: Sequence[Path], cap: int | None, options: argparse.Namespace, clock: Clock) -> StepCost:
    """A short run, and what its steps cost."""
    data = {
        "agents": [{"name": f"agent{i}", "model": str(model)} for i, model in enumerate(models)],
        "output": tempfile.mkdtemp(dir=models[0].parent) + "/run",
        "device": "cpu",
        "threads": 1,
        "steps": options.steps,
        "evaluation": {"problems": 0},
        "checkpoint": {"every": 0},
        # so slow a schedule that the clip interval is open at the 16th update, which eight agents make
        "method": {"name": "hacpo", "clip_low": 0.05, "clip_high": 0.05, "delta": 0.8, "delta_step": 0.01},
        "rollout": {
            "prompts_per_step": options.prompts,
            "rollouts_per_prompt": options.samples,
            "max_new_tokens": options.new_tokens,
        },
        "learning": {"lr": 1e-6, "max_cross_rollouts": cap},
    }
    rows = [{"prompt": text} for text in prompts(options.prompts * options.steps, 60)]
    steps = []
    with LocalRun(build_config(data, "benchmark"), task=RewardTask(functions=some_reward, train=rows)) as run:
        clock.take()
        run.trainer.after_step = lambda: steps.append(clock.take())
        run.train()
    costs = [
        StepCost(
            agents=len(models),
            cap=cap,
            rollout=one["_answer"],
            learning=one["learn"],
            building=one.get("build", 0.0) + one.get("build" + BESIDE, 0.0),
            # samples that are built while another agent learns count as learning above
            bookkeeping=one["step"] - one["_answer"] - one["learn"] + one.get("build" + BESIDE, 0.0),
        )
        for one in steps[1:]
    ]
    return StepCost(
        len(models),
        cap,
        *(
            statistics.median(getattr(one, part) for one in costs)
            for part in ("rollout", "learning", "building", "bookkeeping")
        ),
    )


def exponent(costs: Sequence[StepCost], part: str) -> float | None:
    """p of cost ~ n^p, fitted over the runs of two agents and more."""
    points = [(math.log(one.agents), math.log(getattr(one, part))) for one in costs if one.agents > 1]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


@dataclass(frozen=True)
class Bookkeeping:
    """CPU and wall seconds of all bookkeeping of a step of n agents with made-up responses."""

    agents: int
    cap: int | None
    rollouts: int  # of all agents
    cpu: float
    wall: float

    @property
    def per_thousand(self) -> float:
        """CPU seconds per 1,000 rollouts."""
        return 1000 * self.cpu / self.rollouts


def made_up(
    codec: TextCodec, problems: Sequence[Problem], samples: int, tokens: int
) -> list[VerifiedRollout]:
    """Responses in one agent's tokens."""
    rng = random.Random(codec.name)
    letters = string.ascii_lowercase
    verified = []
    for problem in problems:
        for _ in range(samples):
            text = "".join(rng.choices(letters, k=3 * tokens))
            ids = tuple(codec.tokenizer(text, add_special_tokens=False).input_ids)
            logprobs = tuple(-rng.random() for _ in ids)
            tokenizer = codec.tokenizer_fingerprint
            rollout = Rollout.single_turn(problem, codec.name, text, ids, logprobs, "length", 0, tokenizer)
            right = rng.random() < 0.5
            verified.append(VerifiedRollout(rollout, Verdict(float(right), "correct" if right else "wrong")))
    return verified


def keep_books(
    agents: int, cap: int | None, options: argparse.Namespace, tokenizers: Sequence[Any]
) -> Bookkeeping:
    """Measure the part of a step that is neither generation nor updates."""
    settings = HacpoSettings()
    method = make_method(settings)
    codecs: list[Any] = []
    for i in range(agents):
        tokenizer = tokenizers[i % len(tokenizers)]
        config = SimpleNamespace(eos_token_id=tokenizer.eos_token_id)
        codecs.append(TextCodec(f"agent{i}", tokenizer, config, None))
    problems = [Problem(f"p{i}", prompt, "") for i, prompt in enumerate(prompts(options.real_prompts, 400))]
    rollouts = {
        codec.name: made_up(codec, problems, options.samples, options.real_tokens) for codec in codecs
    }
    retokeniser = Retokeniser()
    builders = [SampleBuilder(codec, method, True, cap, retokeniser) for codec in codecs]
    capabilities = CapabilityTracker.of(list(rollouts), settings)
    cpu, wall = time.process_time(), time.perf_counter()
    groups = group_by_prompt(rollouts)
    capabilities.record(
        {name: [verified.reward for verified in sampled] for name, sampled in rollouts.items()}
    )
    for codec, builder in zip(codecs, builders, strict=True):
        samples = builder.build(groups, capabilities.current.ratio, seed=1)
        learn_report(codec.name, LearnStats(), samples)
    for sampled in rollouts.values():
        rollout_report(sampled)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    return Bookkeeping(agents, cap, sum(map(len, rollouts.values())), *spent)


def table(costs: Sequence[StepCost], books: Sequence[Bookkeeping], tokens: int) -> None:
    """Print the costs and how they grow with the number of agents."""
    print("agents  cap   rollout  learning  bookkeeping  of it samples   share   CPU seconds a step, medians")
    for one in costs:
        print(
            f"{one.agents:6d} {one.cap or '-':>4}  {one.rollout:8.2f}  {one.learning:8.2f}  "
            f"{one.bookkeeping:11.3f}  {one.building:13.3f}  {one.share:6.1%}"
        )
    for cap in dict.fromkeys(one.cap for one in costs):
        found = [one for one in costs if one.cap == cap]
        grown = {part: exponent(found, part) for part in ("rollout", "learning", "bookkeeping")}
        if None not in grown.values():
            powers = ", ".join(f"{part} n^{power:.2f}" for part, power in grown.items())
            print(f"from 2 agents on, {'no cap' if cap is None else f'cap {cap}'}: {powers}")
    print(
        f"\nbookkeeping alone, responses of {tokens} tokens\n"
        "agents  cap  rollouts  CPU s  wall s  CPU s per 1,000 rollouts"
    )
    for book in books:
        print(
            f"{book.agents:6d} {book.cap or '-':>4}  {book.rollouts:8d}  {book.cpu:5.2f}  {book.wall:6.2f}"
            f"  {book.per_thousand:6.2f}"
        )


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="G")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--real-prompts", type=int, default=128, help="of the step of real size; 0: none")
    parser.add_argument("--real-tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    logging.disable_progress_bar()
    clock = Clock()
    wrapped: list[tuple[Any, str]] = [
        (Trainer, "step"),
        (Trainer, "_answer"),
        (Learner, "learn"),
        (SampleBuilder, "build"),
    ]
    for owner, name in wrapped:
        clock.wrap(owner, name)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        models = [
            make_agent(shape, Path(folder) / shape, torch.float32, "cpu", seed)
            for seed, shape in enumerate(SHAPES)
        ]
        for cap in (None, options.samples):
            for n in options.agents:
                chosen = [models[i % len(models)] for i in range(n)]
                costs.append(train(chosen, cap, options, clock))
    books = []
    if options.real_prompts:
        tokenizers = [letter_tokenizer(32768, seed) for seed in (0, 1)]
        keep: Callable[..., Bookkeeping] = functools.partial(
            keep_books, options=options, tokenizers=tokenizers
        )
        books = [keep(n, cap) for cap in (None, options.samples) for n in options.agents]
    table(costs, books, options.real_tokens)
    if options.json:
        found = {"steps": [asdict(one) for one in costs], "bookkeeping": [asdict(one) for one in books]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
