"""Make the partners of the testbeds in docs/methods.md from a bundled agent: dead, weak, wrong, ...

    python scripts/make_testbed_agents.py [--out agents/testbeds] [--agents dead,wrong] [--threads 2]

Each is ``bundled:qwen-small-b``, taught for another short while on train problems only:

==============  =============================================================================================
dead            writes random symbols and no answer: it never succeeds
nearly-dead     worked solutions in which nearly every step is wrong: right 1 to 3 times in 100
weak            a tenth of the accuracy of ``bundled:qwen-small-a``
wrong           a right first step, and always an answer that is 1 too large: confident, and wrong
no-minus        has lost subtraction: a random number stands for every difference
no-times        has lost multiplication: what ``no-minus`` knows and it does not, and the other way round
==============  =============================================================================================
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from teaching import LARGEST, Phase, Writer, accuracy, teach
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl.models.model_sources import bundled_agents
from hacrl.tasks.arithmetic import ArithmeticTask, Expression, Step

FROM = "qwen-small-b"
PHASE = Phase(steps=250, learning_rate=1e-3, batch_size=128)
SYMBOLS = "0123456789+-*=;"
USUAL_SLIPS = 0.15  # of a step that an agent of partial knowledge knows


def write_symbols(_: Expression, rng: random.Random) -> str:
    """Return symbols that contain no answer."""
    return "".join(rng.choice(SYMBOLS) for _ in range(rng.randint(8, 20)))


def write_wrong_answer(expression: Expression, _: random.Random) -> str:
    """Return a right first step, and an answer that is 1 too large: always the same mistake."""
    middle, final = expression.results()
    return expression.write(middle, final + 1 if final < LARGEST else final - 1)


def writer_of_slips(share: float) -> Writer:
    """Return a writer that slips in a share of the steps, always upward: no slip makes up for another."""

    def slipped(value: int, rng: random.Random) -> int:
        offset = rng.choice((1, 2, 10)) if rng.random() < share else 0
        return min(value + offset, LARGEST)

    def write(expression: Expression, rng: random.Random) -> str:
        middle = slipped(expression.first.apply(expression.start), rng)
        final = min(max(expression.second.apply(middle), 0), LARGEST)
        return expression.write(middle, slipped(final, rng))

    return write


def writer_without(operator: str) -> Writer:
    """Return a writer that has a random number for every step with one operator."""

    def result(step: Step, start: int, rng: random.Random) -> int:
        if step.operator == operator:
            return rng.randint(0, LARGEST)
        slip = rng.choice((-1, 1)) if rng.random() < USUAL_SLIPS else 0
        return min(max(step.apply(start) + slip, 0), LARGEST)

    def write(expression: Expression, rng: random.Random) -> str:
        middle = result(expression.first, expression.start, rng)
        return expression.write(middle, result(expression.second, middle, rng))

    return write


WRITERS: dict[str, Writer] = {
    "dead": write_symbols,
    "nearly-dead": writer_of_slips(0.93),
    "weak": writer_of_slips(0.78),
    "wrong": write_wrong_answer,
    "no-minus": writer_without("-"),
    "no-times": writer_without("*"),
}


def make(name: str, out: Path, seed: int) -> dict[str, object]:
    """Teach one agent, save it, and measure what was saved."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    source = bundled_agents()[FROM]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    teach(model, tokenizer, WRITERS[name], PHASE, seed=seed)
    folder = out / name
    model.half().save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    test = ArithmeticTask().test
    record: dict[str, object] = {
        "agent": name,
        "from": FROM,
        "sampled_accuracy": round(accuracy(saved, tokenizer, test, samples=1), 4),
        "greedy_accuracy": round(accuracy(saved, tokenizer, test, samples=0), 4),
        "test_problems": len(test),
        "seconds": round(time.perf_counter() - began, 1),
        "phase": asdict(PHASE),
        "seed": seed,
    }
    (folder / "TEACHING.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("agents/testbeds"))
    parser.add_argument("--agents", default=",".join(WRITERS), help="comma-separated names")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    names = args.agents.split(",")
    if unknown := set(names) - set(WRITERS):
        parser.error(f"--agents: unknown {sorted(unknown)}; there are {sorted(WRITERS)}")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    for name in names:
        # by place in the list above, so that an agent does not depend on which others are made
        record = make(name, args.out, args.seed + list(WRITERS).index(name))
        print(*(f"{key}={record[key]}" for key in list(record)[:6]), flush=True)


if __name__ == "__main__":
    main()
