"""Verdicts per second of MathVerifier against plain math-verify in one process, on the same pairs.

    python benchmarks/verifier.py --data FOLDER [--pairs 400] [--rounds 3]

FOLDER holds JSON-lines files with an "answer" per line. Responses are the gold answers, rewritten in
equivalent forms or changed into wrong ones. Both sides start warm; every round has a fresh MathVerifier,
so that nothing is remembered, and the fastest of the rounds, which alternate, counts.
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

from hacrl.tasks.verification.pool import MathVerifier, judge_plainly
from hacrl.tasks.verification.settings import VerifierSettings

Pair = tuple[str, str]  # gold answer, response
WARM_UP = [(r"\sqrt{8}", rf"\boxed{{{n}\sqrt{{2}}}}") for n in range(2, 8)]


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


def per_second(work: Callable[[], object], count: int) -> float:
    """How many of the pairs a second of the work gets through."""
    start = time.perf_counter()
    work()
    return count / (time.perf_counter() - start)


def measure(pairs: list[Pair], workers: int) -> float:
    """Verdicts per second of a warm verifier that has seen none of the pairs."""
    with MathVerifier(VerifierSettings(workers=workers)) as verifier:
        verifier.verify(WARM_UP)
        return per_second(lambda: verifier.verify(pairs), len(pairs))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=400, help="pairs of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)

    golds = read_golds(options.data)
    random.Random(0).shuffle(golds)
    pairs = [(gold, respond(gold, number)) for number, gold in enumerate(golds)]
    plain = [pair for pair in pairs if judge_plainly(*pair)[0] is not None][: options.pairs]
    symbolic = [pair for pair in pairs if judge_plainly(*pair)[0] is None][: options.pairs]
    kinds = {"plain": plain, "symbolic": symbolic, "mix": plain[::2] + symbolic[::2]}

    judge = plain_math_verify()
    for pair in WARM_UP:
        judge(pair)
    print("pairs       count  math-verify/s   1 worker/s  ratio  2 workers/s  ratio")
    for name, chosen in kinds.items():
        base = one = two = 0.0
        for _ in range(options.rounds):
            base = max(base, per_second(lambda chosen=chosen: [judge(p) for p in chosen], len(chosen)))  # type: ignore[misc]
            one, two = max(one, measure(chosen, 1)), max(two, measure(chosen, 2))
        row = f"{name:10} {len(chosen):>6} {base:>14.0f} {one:>12.0f} {one / base:>6.1f}"
        print(f"{row} {two:>12.0f} {two / base:>6.1f}", flush=True)


if __name__ == "__main__":
    main()
