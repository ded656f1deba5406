"""Wrong verdicts and speed of MathVerifier against plain math-verify, on the same pairs.

    PYTHONPATH=. python benchmarks/verifier.py errors --data FOLDER [--verifier hacrl] [--out FOLDER]
    PYTHONPATH=. python benchmarks/verifier.py speed --data FOLDER [--pairs 400] [--rounds 2]

FOLDER holds JSON-lines files with an "answer" per line.

``errors`` counts accepted wrong answers and refused right ones: every gold answer is changed in the ways of
tests/tasks/math/corruptions.py and rewritten in those of tests/tasks/math/forms.py. Run it once per verifier:
--out keeps the verdicts, so that an
interrupted run goes on, and the table compares the verifiers that have run.

``speed`` takes gold answers, rewritten in equivalent forms (two of three) or changed into wrong ones. Every
round has new responses, so that no verdict is remembered; the first one warms both sides up and is not
counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

from tests.tasks.math.corruptions import KINDS, corruptions
from tests.tasks.math.forms import equivalent

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math import matching
from hacrl.tasks.math.pool import MathVerifier, judge_by_text

Pair = tuple[str, str]  # gold answer, response
Judge = Callable[[Sequence[Pair]], list[bool]]
BATCH = 500


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


def judge_with(verifier: str) -> tuple[str, Judge]:
    """The verifier's name with its version, and its judgement of pairs."""
    if verifier == "hacrl":
        pool = MathVerifier(VerifierSettings(workers=1, time_limit=5.0))
        return f"hacrl {version('hacrl')}", lambda pairs: [v.label == "correct" for v in pool.verify(pairs)]
    from math_verify import parse, verify

    parse_gold = lru_cache(maxsize=None)(lambda gold: parse(rf"\boxed{{{gold}}}"))
    return f"math-verify {version('math-verify')}", lambda pairs: [
        bool(verify(parse_gold(gold), parse(response))) for gold, response in pairs
    ]


def pairs_of(golds: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Kind of change (or "equivalent"), gold answer, content of the box."""
    for gold in golds:
        yield from ((kind, gold, answer) for kind, answer in corruptions(gold))
        yield from (("equivalent", gold, answer) for answer in dict.fromkeys(equivalent(gold).values()))


def count_errors(golds: Sequence[str], verifier: str, out: Path) -> None:
    """Judge the pairs that the folder has no verdict for, and print the table of all its verifiers."""
    pairs = list(dict.fromkeys(pairs_of(golds)))
    name, judge = judge_with(verifier)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.jsonl"
    known = read_verdicts(path)
    waiting = [pair for pair in pairs if pair[1:] not in known]
    with path.open("a", encoding="utf-8") as lines:
        for start in range(0, len(waiting), BATCH):
            batch = [pair[1:] for pair in waiting[start : start + BATCH]]
            verdicts = judge([(gold, rf"\boxed{{{answer}}}") for gold, answer in batch])
            for (gold, answer), accepted in zip(batch, verdicts, strict=True):
                lines.write(json.dumps([gold, answer, accepted], ensure_ascii=False) + "\n")
            lines.flush()
            print(f"\r{start + len(batch)} of {len(waiting)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print_errors(pairs, {file.stem: read_verdicts(file) for file in sorted(out.glob("*.jsonl"))})


def read_verdicts(path: Path) -> dict[Pair, bool]:
    """Return whether each pair of gold answer and box content was accepted."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        return {(gold, answer): accepted for gold, answer, accepted in map(json.loads, lines)}


def print_errors(pairs: Sequence[tuple[str, str, str]], verdicts: dict[str, dict[Pair, bool]]) -> None:
    """Print one row for each kind of change, one for the equivalent forms, and hacrl's wrong verdicts."""
    judged = [pair for pair in pairs if all(pair[1:] in known for known in verdicts.values())]
    print(f"{len(judged)} of {len(pairs)} pairs judged by all")
    total = Counter(kind for kind, *_ in judged)
    print(f"| change | pairs | {' | '.join(verdicts)} |")
    print("|---" * (2 + len(verdicts)) + "|")
    for label, kinds in (
        *((kind, (kind,)) for kind in KINDS),
        ("all", KINDS),
        ("equivalent", ("equivalent",)),
    ):
        accepted = [
            sum(known[pair[1:]] for pair in judged if pair[0] in kinds) for known in verdicts.values()
        ]
        print(f"| {label} | {sum(total[k] for k in kinds):,} | {' | '.join(f'{n:,}' for n in accepted)} |")
    for name, known in verdicts.items():
        if name.startswith("hacrl"):
            for kind, gold, answer in judged:
                if known[gold, answer] != (kind == "equivalent"):
                    print(f"{name}: {kind}: {gold!r} against {answer!r}")


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
    parser.add_argument("mode", choices=("errors", "speed"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--verifier", choices=("hacrl", "math-verify"), default="hacrl", help="of errors")
    parser.add_argument("--every", type=int, default=1, help="errors: take every n-th gold answer only")
    parser.add_argument("--out", type=Path, default=Path("verifier_errors"), help="errors: a folder")
    parser.add_argument("--pairs", type=int, default=400, help="speed: pairs of each kind and round")
    parser.add_argument("--rounds", type=int, default=2, help="of speed")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.mode == "errors":
        golds = read_golds(options.data)
        random.Random(0).shuffle(golds)  # an interrupted run has a sample
        count_errors(golds[:: options.every], options.verifier, options.out)
        return

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
