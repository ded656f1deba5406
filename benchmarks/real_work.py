"""Whole steps, memory, and seconds of training to a given accuracy, on real models: hacrl beside TRL.

    python benchmarks/real_work.py --models models/qwen-coder-1.5b models/tinyllama-1.1b \
        --train gsm8k.train.jsonl --test gsm8k.test.jsonl --new-tokens 1024 --engine vllm
    python benchmarks/real_work.py --models MODEL MODEL --train TRAIN --test TEST --device cpu --threads 1 \
        --prompts 2 --samples 2 --new-tokens 8 --steps 2 --evaluated 4 --micro-batch 4

Models are plain Hugging Face folders, problems are JSON lines with the columns problem and answer. Needs TRL
besides hacrl (requirements/trl.txt), and with --engine vllm also vLLM: then both sides sample with it, else
both with transformers. Each side runs in a process of its own, one after the other, on one device. TRL
trains one agent after the other with GSPO; its seconds are those of all agents together. "To TRL's accuracy":
seconds until an evaluation finds the accuracy that the agent had at the end of TRL's run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from real_sides import Found, RealWork

SIDES = ("hacrl hacpo", "hacrl gspo", "trl")
PHASES = ("rollout", "verify", "learn", "rest")


def main() -> None:
    """Measure the sides, print tables, and write JSON if requested."""
    options = _options()
    if options.side:  # a process that measures one side
        _measure_side(options.side, options.folder)
        return
    work = _work(options)
    found = [_in_own_process(side, work) for side in options.sides]
    for line in lines(work, found, options.warmup):
        print(line)
    if options.json:
        record = {"work": asdict(work), "found": [asdict(side) for side in found]}
        options.json.write_text(json.dumps(record) + "\n")


def _in_own_process(side: str, work: RealWork) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(asdict(work)))
        print(f"... {side}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "--side", side, "--folder", folder]
        ended = subprocess.run(command, check=False)
        if ended.returncode:
            return Found(side, failure=f"exit code {ended.returncode}")
        return Found(**json.loads((Path(folder) / "found.json").read_text()))


def _measure_side(side: str, folder: Path) -> None:
    from real_sides import measure_hacrl, measure_trl

    given = json.loads((folder / "work.json").read_text())
    work = RealWork(**{**given, "models": tuple(given["models"])})
    try:
        found = measure_trl(work) if side == "trl" else measure_hacrl(work, side.split()[1])
    except torch.OutOfMemoryError as error:
        found = Found(side, failure=f"out of memory: {str(error).splitlines()[0]}")
    (folder / "found.json").write_text(json.dumps(asdict(found)))


def lines(work: RealWork, found: Sequence[Found], warmup: int) -> Iterator[str]:
    """Yield the tables of all sides; the first ``warmup`` steps count only as seconds of training."""
    measured = [side for side in found if not side.failure]
    yield "side            step s (lowest - highest)   " + "".join(f"{phase:>9}" for phase in PHASES)
    for side in found:
        if side.failure:
            yield f"{side.side:14}  {side.failure}"
            continue
        counted = side.seconds[warmup:] or side.seconds
        whole = [step["step"] for step in counted]
        phases = [statistics.median(step.get(phase, 0.0) for step in counted) for phase in PHASES]
        yield (
            f"{side.side:14}  {statistics.median(whole):7.2f} ({min(whole):.2f} - {max(whole):.2f})     "
            + "".join(f"{seconds:9.2f}" for seconds in phases)
        )
    yield ""
    yield "side            to the end of step 1   tokens a response   memory GiB"
    for side in measured:
        memory = ", ".join(f"{what} {size:.1f}" for what, size in side.memory.items())
        yield f"{side.side:14}  {side.first_step:8.1f} s   {statistics.mean(side.lengths):17.0f}   {memory}"
    yield ""
    trl = next((side for side in measured if side.side.startswith("TRL")), None)
    yield "side            agent    accuracy before  after (standard error)   training s   to TRL's accuracy"
    for side in measured:
        for agent in work.names:
            (_, _, before, _), *_, (_, spent, after, error) = side.accuracies[agent]
            reached = None if trl is None else side.seconds_to(agent, trl.accuracies[agent][-1][2])
            shown = "not reached" if reached is None else f"{reached:.0f}"
            yield (
                f"{side.side:14}  {agent:8} {before:14.3f}  {after:6.3f} ({error:.3f})"
                f"           {spent:10.0f}   {shown if trl else '':>12}"
            )


def _work(options: argparse.Namespace) -> RealWork:
    return RealWork(
        models=tuple(map(str, options.models)),
        train=str(options.train),
        test=str(options.test),
        device=options.device,
        prompts=options.prompts,
        samples=options.samples,
        new_tokens=options.new_tokens,
        updates=options.updates,
        steps=options.steps,
        every=options.every,
        evaluated=options.evaluated,
        lr=options.lr,
        engine=options.engine,
        vllm_memory=options.vllm_memory,
        micro_batch=options.micro_batch,
        hacrl_tokens=options.hacrl_tokens,
        checkpointing=options.checkpointing,
        trl_dtype=options.trl_dtype,
        threads=options.threads,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", type=Path, default=[], help="folders, one per agent")
    add("--train", type=Path, help="JSON lines with problem and answer")
    add("--test", type=Path)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--prompts", type=int, default=32, help="a step")
    add("--samples", type=int, default=8, help="responses of each agent to a prompt")
    add("--new-tokens", type=int, default=1024)
    add("--updates", type=int, default=2, help="on each agent's responses, a step")
    add("--steps", type=int, default=40)
    add("--warmup", type=int, default=1, help="first steps that the table of steps leaves out")
    add("--every", type=int, default=10, help="steps between evaluations")
    add("--evaluated", type=int, default=200, help="held-out problems")
    add("--lr", type=float, default=1e-6)
    add("--engine", choices=["transformers", "vllm"], default="transformers", help="of both sides")
    add("--vllm-memory", type=float, default=0.3, help="share of the GPU for one vLLM engine")
    add("--micro-batch", type=int, default=8, help="TRL's responses in one forward pass")
    add("--hacrl-tokens", type=int, help="hacrl's learning.micro_batch_tokens; default: hacrl chooses")
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=False)
    add("--trl-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="TRL's weights on a GPU")
    add("--sides", nargs="+", choices=SIDES, default=SIDES)
    add("--threads", type=int)
    add("--json", type=Path)
    add("--side", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.side and not (options.models and options.train and options.test):
        parser.error("--models, --train and --test are needed")
    return options


if __name__ == "__main__":
    main()
