"""hacrl against TRL's GRPOTrainer on the same models, prompts, lengths, rollouts and updates, in one go.

    python benchmarks/against_trl.py --shapes qwen3-0.6b qwen3-0.6b --prompts 32 --new-tokens 256
    python benchmarks/against_trl.py --device cpu --threads 1                    # 0.85M parameters
    python benchmarks/against_trl.py --learner-only --shapes qwen3-1.7b --prompts 2 --new-tokens 1024

Needs TRL besides hacrl (requirements/trl.txt). TRL trains one agent after the other with GSPO (with
``--trl-once`` the first alone, whose steps then count as many times as there are agents); hacrl trains
them in one run, once with GSPO (each from its own rollouts, as TRL does) and once with HACPO (each from all
agents' rollouts, as many updates). Weights are random and never stop, so that every response has full length;
the reward is a meaningless number. Every side runs in a process of its own, one after the other. The first
steps are not counted; of the others the median is printed, with the fastest and the slowest. On a CPU that
others use, too, processor time (cpu) is steadier than the clock.

``--learner-only``: nothing is generated; both learn from the same random tokens. Memory is what torch has
allocated: held before an update, and beyond that at its fullest. FLOPs: see training_work.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import torch
from comparison_tables import step_table, update_table
from shapes import SHAPES
from training_work import Measured, Work, dump, load_measured, load_work, make_agents, matmul_peak

from hacrl.config.schema import OffloadLevel

SIDES = ("hacrl gspo", "hacrl hacpo", "trl")


def main() -> None:
    """Measure both sides, print tables, and write JSON if requested."""
    options = _options()
    if options.side:  # a process that measures one side
        _measure_side(options.side, options.folder)
        return
    work = _work(options)
    found: dict[str, list[Measured]] = {}
    peak = _in_own_process("peak", work) if work.on_gpu else None
    flops = peak.learnt_flops if peak else None
    if options.learner_only:
        learners = [side for side in ("hacrl learner", "trl") if _is_among(side, options.sides)]
        both = (False, True)
        for checkpointing in both if options.checkpointing is None else (options.checkpointing,):
            this = replace(work, checkpointing=checkpointing)
            name = "gradient checkpointing" if checkpointing else "no gradient checkpointing"
            found[name] = [_in_own_process(side, this) for side in learners]
            print(f"\n{name}\n{update_table(this, found[name], flops)}", flush=True)
    else:
        for number in range(options.repeats):
            name = f"run {number + 1}"
            found[name] = [_in_own_process(side, work) for side in options.sides]
            print(f"\n{name}\n{step_table(work, found[name], flops)}", flush=True)
    if options.json:
        sides = {name: [asdict(side) for side in measured] for name, measured in found.items()}
        record = {"work": asdict(work), "matmul_flops": flops, "found": sides}
        options.json.write_text(json.dumps(record) + "\n")


def _is_among(learner: str, sides: Sequence[str]) -> bool:
    """Return whether a side of that library is to be measured."""
    return any(side.split()[0] == learner.split()[0] for side in sides)


def _in_own_process(side: str, work: Work) -> Measured:
    """What a fresh process finds; its memory is free again afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        dump(Path(folder) / "work.json", work)
        command = [sys.executable, __file__, "--side", side, "--folder", folder]
        print(f"... {side}", file=sys.stderr, flush=True)
        ended = subprocess.run(command, check=False)
        if ended.returncode:
            return Measured(side, failure=f"exit code {ended.returncode}")
        return load_measured(Path(folder) / "found.json")


def _measure_side(side: str, folder: Path) -> None:
    work = load_work(folder / "work.json")
    try:
        found = _measured(side, work, folder)
    except torch.OutOfMemoryError as error:
        found = Measured(side, failure=f"out of memory: {str(error).splitlines()[0]}")
    dump(folder / "found.json", found)


def _measured(side: str, work: Work, folder: Path) -> Measured:
    if side == "peak":
        return Measured(side, learnt_flops=matmul_peak())
    folders = make_agents(work, folder)
    gc.collect()  # what made the models
    if work.on_gpu:
        torch.cuda.empty_cache()
    if side == "trl":
        from trl_side import measure as measure_trl

        return measure_trl(work, folders)
    from hacrl_side import measure, measure_updates

    return (
        measure_updates(work, folders[0])
        if side == "hacrl learner"
        else measure(work, folders, side.split()[1])
    )


def _work(options: argparse.Namespace) -> Work:
    learner_only = options.learner_only
    responses = options.prompts * options.samples
    return Work(
        shapes=tuple(options.shapes[:1] if learner_only else options.shapes),
        device=options.device,
        prompts=options.prompts,
        samples=options.samples,
        prompt_letters=options.prompt_letters,
        new_tokens=options.new_tokens,
        updates=1 if learner_only else options.updates,
        micro_batch=options.micro_batch or responses // options.updates,
        steps=options.steps,
        warmup=options.warmup,
        checkpointing=bool(options.checkpointing),
        engine=options.engine,
        vllm_memory=options.vllm_memory,
        vllm_sleep=not options.vllm_awake,
        vllm=options.vllm,
        side_by_side=options.max_batch,
        hacrl_tokens=options.hacrl_tokens,
        hacrl_offload=options.hacrl_offload,
        trl_dtype=options.trl_dtype,
        trl_generation=options.trl_generation,
        trl_once=options.trl_once,
        threads=options.threads,
        one_tokenizer=options.one_tokenizer,
        given_prompt_tokens=options.prompt_tokens if learner_only else 0,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.85m", "qwen3-0.85m"], help="one per agent")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--prompts", type=int, default=8)
    add("--samples", type=int, default=8)
    add("--prompt-letters", type=int, default=32, help="about three and a half make a token of large shapes")
    add("--new-tokens", type=int, default=32)
    add("--updates", type=int, default=1, help="of every agent, a step")
    add("--micro-batch", type=int, help="responses in a forward pass; default: all of an update")
    add("--hacrl-tokens", type=int, help="hacrl's learning.micro_batch_tokens; default: as TRL's micro-batch")
    levels = ["auto", *get_args(OffloadLevel)]
    add("--hacrl-offload", choices=levels, default="auto", help="hacrl's learning.offload")
    add("--max-batch", type=int, help="responses that hacrl decodes side by side; default: all")
    checkpointing = "gradient checkpointing, on both sides; default: without, and with --learner-only both"
    add("--checkpointing", action=argparse.BooleanOptionalAction, help=checkpointing)
    add("--steps", type=int, default=5, help="counted")
    add("--warmup", type=int, default=2, help="not counted")
    add("--repeats", type=int, default=1, help="of the whole comparison")
    add("--sides", nargs="+", choices=SIDES, default=SIDES)
    add("--engine", choices=["transformers", "vllm"], default="transformers", help="of both sides")
    add("--vllm-memory", type=float, default=0.3, help="share of the GPU for one vLLM engine")
    add("--vllm-awake", action="store_true", help="vLLM engines keep their memory while agents learn")
    add("--vllm", type=json.loads, default={}, help='JSON, more of hacrl\'s, e.g. {"seeded": true}')
    add("--trl-dtype", choices=["bfloat16", "float32"], default="bfloat16", help="TRL's weights on a GPU")
    add("--trl-generation", type=json.loads, default={}, help="JSON, further generation options of TRL")
    add("--trl-once", action="store_true", help="TRL trains one of the equal agents, which counts for all")
    add("--one-tokenizer", action="store_true", help="all agents have the same: nothing is retokenised")
    add("--threads", type=int)
    add("--learner-only", action="store_true")
    add("--prompt-tokens", type=int, default=128, help="with --learner-only")
    add("--json", type=Path)
    add("--side", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl_once and len(set(options.shapes)) > 1:
        parser.error(
            f"--trl-once: agents of different shapes ({' '.join(options.shapes)}) are not equal work"
        )
    return options


if __name__ == "__main__":
    main()
