"""Tokens per second of every way to generate: same agent, same prompts, same lengths, one run.

    python benchmarks/rollout_engines.py --shape qwen3-0.6b --sides raw-vllm,vllm,generate,transformers
    python benchmarks/rollout_engines.py --device cpu --threads 1 --work 16x8x32x64 --sides raw-vllm,vllm

Sides: `raw-vllm` is `vllm.LLM.generate` alone, with the arguments of hacrl's engine; `vllm` and
`transformers` are hacrl's engines, with answers verified while others are generated; `generate` and `static`
are transformers' `generate` with its dynamic and its static, compiled cache. All are compared with the first.

Every round has new prompts, so that no cached prefix helps; each case's first round warms up and is not
counted. The bandwidth floor is the time to read weights, keys and values once for every token, at the speed
of a large copy. All responses have the same length and end together, so verification can hide behind little:
what it adds after the last response is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rollout_costs import Costs, Device, costs_of, measure_device
from rollout_sides import GENERATE, SIDES, Made, Setup, Side, let_go, make_side
from rollout_work import Work, make_problems
from shapes import SHAPES, make_agent

from hacrl.config.schema import AgentSettings, VllmSettings
from hacrl.models.agent import Agent
from hacrl.types import Problem

GIB = 2**30


@dataclass
class Found:
    """One side on one case."""

    side: str
    work: str
    start_s: float  # of the engine, in the side's first case
    warm_up_s: float = 0.0  # the round that is not counted
    tokens_per_s: list[float] = field(default_factory=list)
    after_last_s: list[float] = field(default_factory=list)  # of that, judging after the last response
    peak_gib: float | None = None  # of the whole device, after a round
    peak_torch_gib: float | None = None  # allocated by this process; vLLM computes in another one
    floor_share: float = 0.0  # of the speed the memory's bandwidth would allow, median round
    flops_share: float = 0.0  # of the measured matrix product's speed, median round
    against_first: float = 1.0  # median by median

    @property
    def median(self) -> float:
        """Tokens per second."""
        return statistics.median(self.tokens_per_s)

    def note(self, made: Made, seconds: float, is_warm: bool) -> None:
        """A round is over."""
        if is_warm:
            self.tokens_per_s.append(made.tokens / seconds)
            self.after_last_s.append(made.after_last_s)
        else:
            self.warm_up_s = seconds
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.peak_gib = max(self.peak_gib or 0.0, (total - free) / GIB)
            self.peak_torch_gib = torch.cuda.max_memory_allocated() / GIB

    def conclude(self, work: Work, costs: Costs, device: Device, first: Found | None) -> None:
        """Once all rounds are there."""
        seconds = work.responses * work.new_tokens / self.median
        self.floor_share = costs.floor_seconds(work, device.bandwidth) / seconds
        self.flops_share = costs.flops / seconds / device.flops
        if first is not None:
            self.against_first = self.median / first.median

    def line(self) -> str:
        """For reading."""
        speeds = self.tokens_per_s
        after = statistics.median(self.after_last_s)
        memory = (
            "" if self.peak_gib is None else f"  {self.peak_gib:.1f} GiB ({self.peak_torch_gib:.1f} torch)"
        )
        return (
            f"{self.work:16} {self.side:13} {self.median:>10,.0f} tok/s  best {max(speeds):>9,.0f}  "
            f"spread {(max(speeds) - min(speeds)) / self.median:5.1%}  x{self.against_first:6.3f}  "
            f"floor {self.floor_share:6.2%}  flops {self.flops_share:6.2%}  start {self.start_s:.1f} s "
            f"warm-up {self.warm_up_s:.2f} s  judging after {after:.3f} s{memory}"
        )


def play(
    sides: dict[str, Side], works: Sequence[Work], rounds: Sequence[list[list[Problem]]], most: dict[str, int]
) -> list[Found]:
    """Start sides and let them take turns, round by round: what else the machine does hits all of them.

    ``most`` is how many counted rounds of a case a side takes part in, if not in all.
    """
    starts = {}
    for name, side in sides.items():
        start = time.perf_counter()
        side.start()
        starts[name] = time.perf_counter() - start
        print(f"{name} ready after {starts[name]:.1f} s", flush=True)
    found = []
    for work, case in zip(works, rounds, strict=True):
        here = {name: Found(name, work.name, starts[name]) for name in sides}
        for number, problems in enumerate(case):
            for name, side in sides.items():
                if number <= most.get(name, len(case)):
                    start = time.perf_counter()
                    made = side.generate(problems, work, seed=number)
                    here[name].note(made, time.perf_counter() - start, is_warm=number > 0)
        found += here.values()
    for side in sides.values():
        side.close()
    return found


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Setup, list[list[list[Problem]]]]:
    """The agent, and each case's rounds of problems."""
    dtype = getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))
    model = make_agent(options.shape, folder / "agent", dtype, options.device, stops=False)
    settings = AgentSettings(name="agent", model=str(model), precision=str(dtype).removeprefix("torch."))
    agent = Agent.load(settings, options.device)
    rounds = [
        [make_problems(agent, work.prompts, work.prompt_tokens, seed) for seed in range(options.rounds + 1)]
        for work in options.work
    ]
    vllm = VllmSettings(
        mode="server" if options.python else "child",
        python=options.python,
        memory=options.memory,
        sleep=options.sleep,
        max_sequences=options.max_sequences or max(work.responses for work in options.work),
        engine_args=options.engine_args,
    )
    longest = max(work.prompt_tokens + work.new_tokens for work in options.work)
    return Setup(agent, model, folder, vllm, longest, options.symbolic, rounds[0][0][:4]), rounds


def measure(options: argparse.Namespace, folder: Path) -> bool:
    """All sides, all cases; what is found is printed and written as it comes. Whether all of it worked."""
    setup, rounds = prepare(options, folder)
    model, side_by_side = setup.agent.model, max(work.responses for work in options.work)
    device = measure_device(options.device, model.dtype)
    print(
        f"copy {device.bandwidth / 1e9:,.1f} GB/s, matrix product {device.flops / 1e12:,.2f} TFLOP/s",
        flush=True,
    )
    costs = {work.name: costs_of(model, work) for work in options.work}
    taking_turns = [name for name in options.sides if options.together and name.endswith("vllm")]
    groups = [taking_turns, *([name] for name in options.sides if name not in taking_turns)]
    few = {} if options.generate_rounds is None else dict.fromkeys(GENERATE, options.generate_rounds)
    found: dict[tuple[str, str], Found] = {}
    failed = False
    for group in filter(None, groups):
        let_go()
        try:
            sides = {name: make_side(name, setup, side_by_side) for name in group}
            new = play(sides, options.work, rounds, few)
        except Exception:  # the other sides are worth knowing all the same
            traceback.print_exc()
            failed = True
            continue
        for one in new:
            found[one.side, one.work] = one
            work = Work.parse(one.work)
            one.conclude(work, costs[one.work], device, found.get((options.sides[0], one.work)))
            print(one.line(), flush=True)
        if options.json:
            record = {
                "shape": options.shape,
                "dtype": str(model.dtype),
                "device": asdict(device),
                "costs": {name: asdict(cost) for name, cost in costs.items()},
                "sides": [asdict(one) for one in found.values()],
            }
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    print_ratios(found, options.work)
    return not failed


def print_ratios(found: dict[tuple[str, str], Found], works: Sequence[Work]) -> None:
    """Median against median, of the pairs one wants to know."""
    for work in works:
        for ours, theirs in (
            ("vllm", "raw-vllm"),
            ("transformers", "generate"),
            ("transformers", "raw-vllm"),
        ):
            if (ours, work.name) in found and (theirs, work.name) in found:
                ratio = found[ours, work.name].median / found[theirs, work.name].median
                print(f"{work.name:16} {ours} / {theirs}: {ratio:.3f}", flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sides", default="raw-vllm,vllm,generate,transformers", help=",".join(SIDES))
    parser.add_argument(
        "--work", type=Work.parse, action="append", help="PROMPTSxSAMPLESxPROMPT_TOKENSxNEW_TOKENS"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted ones")
    parser.add_argument("--generate-rounds", type=int, help="of transformers' generate, which is slow")
    parser.add_argument("--together", action="store_true", help="both vLLM sides in memory, taking turns")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--symbolic", type=float, default=0.2, help="share of answers that need a verification worker"
    )
    parser.add_argument("--python", help="interpreter with vLLM: hacrl's engine is then a server")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU for a vLLM engine")
    parser.add_argument(
        "--sleep", action="store_true", help="vLLM with sleep mode, as in training on one GPU"
    )
    parser.add_argument("--max-sequences", type=int, help="side by side in vLLM; all if left out")
    parser.add_argument("--engine-args", type=json.loads, default={})
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.sides = options.sides.split(",")
    options.work = options.work or [Work(32, 8, 128, 256)]
    unknown = set(options.sides) - set(SIDES)
    if unknown:
        parser.error(f"unknown sides {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    return options


def main() -> None:
    """Measure, print, and write JSON if requested."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(0 if measure(options, Path(folder)) else 1)


if __name__ == "__main__":
    main()
