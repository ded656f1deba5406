"""Verdicts per second of MathVerifier against plain math-verify in one process, on the same pairs.

    python benchmarks/verifier.py --data FOLDER [--pairs 400] [--rounds 2]

FOLDER holds JSON-lines files with an "answer" per line. Responses are the gold answers, rewritten in
equivalent forms (two of three) or changed into wrong ones. Every round has new responses, so that no verdict
is remembered; the first one warms both sides up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math import matching
from hacrl.tasks.math.pool import MathVerifier, judge_by_text

Pair = tuple[str, str]  # gold answer, response


def read_golds(folder: Path) -> list[str]:
    """Every different gold answer of the folder's files."""
    golds: dict[str, None] = {}
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            golds |= dict.fromkeys(json.loads(line)["answer"] for line in lines)
    return [gold for gold in golds if gold]


def respond(gold: str, number: int) -> str:
    """Every third response is wrong; the others say the same in other words."""
    if re.fullmatch(r"-?[0-9]+", gold):
        answer = [f"{gold}.0", rf"{gold}\text{{ cm}}", str(int(gold) + 1)][number % 3]
    elif re.search(r"\\text|\\mbox|\\begin|=|,", gold):
        answer = [gold.replace(r"\frac", r"\dfrac"), f"{gold}.", rf"{gold}, 7"][number % 3]
    else:
        answer = [rf"1\cdot({gold})", rf"({gold})+1-1", rf"({gold})+1"][number % 3]
    return rf"We compute step by step. Hence the final answer is $\boxed{{{answer}}}$."


def plain_math_verify() -> Callable[[Pair], bool]:
    """math-verify as its documentation has it: parse both, verify."""
    from math_verify import parse, verify

    def judge(pair: Pair) -> bool:
        gold, answer = parse(rf"\boxed{{{pair[0]}}}"), parse(pair[1])
        return bool(verify(gold, answer))

    return judge


def seconds(work: Callable[[], object]) -> float:
    """How long the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(name: str, golds: list[str], rounds: int) -> None:
    """Print one row. The first round warms both sides up and is not counted."""
    judge = plain_math_verify()
    times = [0.0, 0.0, 0.0]
    with (
        MathVerifier(VerifierSettings(workers=1)) as one,
        MathVerifier(VerifierSettings(workers=2)) as two,
    ):
        for number in range(rounds + 1):
            pairs = [(gold, respond(gold, at + number)) for at, gold in enumerate(golds)]
            took = [seconds(lambda pairs=pairs: [judge(pair) for pair in pairs])]  # type: ignore[misc]
            for verifier in (one, two):
                matching.parse_answer.cache_clear()
                took.append(seconds(lambda v=verifier, pairs=pairs: v.verify(pairs)))  # type: ignore[misc]
            if number:
                times = [total + new for total, new in zip(times, took, strict=True)]
    base, *ours = [rounds * len(golds) / total for total in times]
    columns = "".join(f" {speed:>12.0f} {speed / base:>6.1f}" for speed in ours)
    print(f"{name:10} {rounds * len(golds):>6} {base:>14.0f}{columns}", flush=True)


def needs_worker(gold: str) -> list[bool]:
    """For each of the three kinds of response, whether the text alone does not decide it."""
    return [judge_by_text(gold, respond(gold, number))[0] is None for number in range(3)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=400, help="pairs of each kind and round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)

    golds = read_golds(options.data)
    random.Random(0).shuffle(golds)
    plain = [gold for gold in golds if needs_worker(gold) == [False] * 3][: options.pairs]
    symbolic = [gold for gold in golds if needs_worker(gold) == [True] * 3][: options.pairs]
    print("pairs       count  math-verify/s   1 worker/s  ratio  2 workers/s  ratio")
    compare("plain", plain, options.rounds)
    compare("symbolic", symbolic, options.rounds)
    compare("mix", plain[::2] + symbolic[::2], options.rounds)


if __name__ == "__main__":
    main()
