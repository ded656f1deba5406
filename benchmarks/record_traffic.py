"""What a step's records cost beside the models: bytes and CPU seconds per token in the log and on the way.

    python benchmarks/record_traffic.py [--rollouts 512] [--tokens 256] [--ray] [--gloo qwen3-60m]

The records are those of a run: 512 verified rollouts of 256 tokens with log-probabilities, ids drawn from a
vocabulary of 151,936.

- log: the rollout log writes and reads them; learnt: the log of what one learner made of each
- pickle: what Ray and other executors do to send a record to another process
- object store (with --ray): ``ray.put`` in this process, ``ray.get`` in another
- gloo (with --gloo): the broadcast of a model's weights, tensor by tensor, to another process of this machine

CPU seconds are those of the process that does the work. Wall seconds include the disk or the other process.
Both are medians of all rounds.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from shapes import SHAPES, make_agent

from hacrl.rollouts.log import RolloutLog
from hacrl.types import LearntRollout, Problem, Rollout, Verdict, VerifiedRollout

VOCABULARY = 151_936
GROUP = 8


@dataclass(frozen=True)
class Cost:
    """Of one way to store or send all records."""

    way: str
    tokens: int
    bytes: int
    cpu: float  # seconds
    wall: float

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one response token, with its share of the record around it."""
        return self.bytes / self.tokens


def make_rollouts(count: int, tokens: int, prompt_tokens: int = 128) -> list[VerifiedRollout]:
    """Return ``count`` verified rollouts, eight to a prompt, three letters of text to a token."""
    draw = random.Random(0)
    found = []
    for number in range(count):
        problem = Problem(f"p{number // GROUP}", "x" * 3 * prompt_tokens, "42")
        ids = tuple(draw.randrange(VOCABULARY) for _ in range(tokens))
        logprobs = tuple(torch.tensor([math.log(draw.random()) for _ in range(tokens)]).tolist())
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(prompt_tokens))
        text = "abc" * tokens
        rollout = Rollout.single_turn(problem, "small", text, ids, logprobs, "stop", 7, "0" * 16, prompt)
        found.append(VerifiedRollout(rollout, Verdict(1.0, "correct")))
    return found


def make_learnt(rollouts: Sequence[VerifiedRollout], retokenised: bool) -> list[LearntRollout]:
    """Return what a learner with another tokenizer, or with the same one, made of the rollouts."""
    found = []
    for number, verified in enumerate(rollouts):
        rollout = verified.rollout
        found.append(
            LearntRollout(
                learner="large",
                agent="small",
                problem=rollout.problem.id,
                sample=number % GROUP,
                fate="used",
                advantage=0.5,
                ratio=0.93,
                clipped=0.0,
                weight=0.01,
                token_ids=rollout.token_ids if retokenised else None,
                token_logprobs=tuple(round(logprob, 4) for logprob in rollout.token_logprobs),
            )
        )
    return found


def timed(rounds: int, work: Callable[[], Any]) -> tuple[float, float]:
    """Return the median CPU and wall seconds of a call."""
    cpu, wall = [], []
    for _ in range(rounds):
        start = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - start[0])
        wall.append(time.perf_counter() - start[1])
    return statistics.median(cpu), statistics.median(wall)


def measure_log(rollouts: Sequence[VerifiedRollout], tokens: int, rounds: int, folder: Path) -> list[Cost]:
    """Write and read the rollout log and the log of learnt rollouts."""
    log, problems = RolloutLog(folder), {r.rollout.problem.id: r.rollout.problem for r in rollouts}.values()
    spent = timed(rounds, lambda: log.append(1, "small", rollouts))
    size = sum(path.stat().st_size for path in folder.rglob("small.jsonl"))
    costs = [Cost("log, write", tokens, size, *spent)]
    costs.append(Cost("log, read", tokens, size, *timed(rounds, lambda: log.load(1, "small", problems))))
    for step, (name, is_retokenised) in enumerate((("own tokens", False), ("retokenised", True)), start=2):
        records = make_learnt(rollouts, is_retokenised)
        spent = timed(rounds, lambda step=step, records=records: log.append_learnt(step, "large", records))
        size = sum(path.stat().st_size for path in (folder / f"step-{step:06d}").rglob("large.jsonl"))
        costs.append(Cost(f"learnt, {name}, write", tokens, size, *spent))
    return costs


def measure_pickle(rollouts: Sequence[VerifiedRollout], tokens: int, rounds: int) -> list[Cost]:
    """Pickle the records and read them back."""
    content = pickle.dumps(rollouts, protocol=5)
    assert pickle.loads(content) == rollouts
    writing = timed(rounds, lambda: pickle.dumps(rollouts, protocol=5))
    reading = timed(rounds, lambda: pickle.loads(content))
    return [
        Cost("pickle, write", tokens, len(content), *writing),
        Cost("pickle, read", tokens, len(content), *reading),
    ]


def measure_ray(rollouts: Sequence[VerifiedRollout], tokens: int, rounds: int) -> list[Cost]:
    """Put the records into Ray's object store and get them in another process of this machine."""
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=2**28)
    try:

        @ray.remote
        def get(references: list[Any]) -> tuple[float, float]:
            start = time.process_time(), time.perf_counter()
            received = ray.get(references[0])
            assert len(received) > 0
            return time.process_time() - start[0], time.perf_counter() - start[1]

        size = len(pickle.dumps(rollouts, protocol=5))
        writing = timed(rounds, lambda: ray.put(rollouts))
        reference = ray.put(rollouts)
        spent = [ray.get(get.remote([reference])) for _ in range(rounds + 1)][1:]  # the first starts a worker
        reading = statistics.median(cpu for cpu, _ in spent), statistics.median(wall for _, wall in spent)
    finally:
        ray.shutdown()
    return [
        Cost("object store, put", tokens, size, *writing),
        Cost("object store, get", tokens, size, *reading),
    ]


def _broadcast(rank: int, port: int, shapes: list[torch.Size], rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, world_size=2, rank=rank)
    draw = torch.Generator().manual_seed(0)
    sent = [torch.randn(shape, generator=draw) for shape in shapes]
    weights = sent if rank == 0 else [torch.zeros(shape) for shape in shapes]
    spent = []
    for _ in range(rounds + 1):
        torch.distributed.barrier()
        start = time.process_time(), time.perf_counter()
        for tensor in weights:
            torch.distributed.broadcast(tensor, 0)
        torch.distributed.barrier()
        spent.append((time.process_time() - start[0], time.perf_counter() - start[1]))
    if rank == 1:
        assert all(torch.equal(got, want) for got, want in zip(weights, sent, strict=True))
        results.put(spent[1:])
    torch.distributed.destroy_process_group()


def measure_gloo(shape: str, rounds: int) -> tuple[Cost, int]:
    """Broadcast a model's float32 weights to another process; return the cost and the number of weights."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(make_agent(shape, Path(folder), torch.float32, "cpu"))
        shapes = [parameter.shape for parameter in model.parameters()]
    weights = sum(math.prod(shape) for shape in shapes)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=_broadcast, args=(rank, port, shapes, rounds, results)) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    spent = results.get(timeout=300)
    for rank in ranks:
        rank.join(60)
    cpu, wall = (statistics.median(values) for values in zip(*spent, strict=True))
    return Cost(f"gloo, {shape}", weights, 4 * weights, cpu, wall), weights


def main() -> None:
    """Measure, print, and write JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ray", action="store_true", help="measure Ray's object store, too")
    parser.add_argument("--gloo", choices=list(SHAPES), help="broadcast the weights of a model of this shape")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rollouts = make_rollouts(options.rollouts, options.tokens)
    tokens = options.rollouts * options.tokens
    with tempfile.TemporaryDirectory() as folder:
        costs = measure_log(rollouts, tokens, options.rounds, Path(folder))
    costs += measure_pickle(rollouts, tokens, options.rounds)
    if options.ray:
        costs += measure_ray(rollouts, tokens, options.rounds)
    print(f"{options.rollouts} rollouts x {options.tokens} tokens, medians of {options.rounds} rounds\n")
    print("way                          MB  bytes/token  CPU s  wall s  CPU s per million tokens")
    for cost in costs:
        print(
            f"{cost.way:24s} {cost.bytes / 1e6:6.2f}  {cost.bytes_per_token:11.1f}  {cost.cpu:5.3f}  "
            f"{cost.wall:6.3f}  {1e6 * cost.cpu / cost.tokens:6.3f}"
        )
    if options.gloo:
        cost, weights = measure_gloo(options.gloo, options.rounds)
        costs.append(cost)
        print(
            f"\n{cost.way}: {weights / 1e6:.1f} million weights, {cost.bytes / 1e6:.0f} MB, "
            f"{cost.wall:.3f} s, {cost.bytes / cost.wall / 1e9:.2f} GB/s"
        )
    if options.json:
        options.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
