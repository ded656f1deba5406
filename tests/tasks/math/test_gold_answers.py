"""Every gold answer of the usual benchmarks accepts itself in equivalent forms, and no wrong one.

A sample by default; HACRL_ALL_GOLDS=1 takes all of them (some minutes). Prints the exceptions it finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math.pool import MathVerifier
from tests.tasks.math.forms import equivalent, wrong

Form = tuple[str, str, str]
Judge = Callable[[list[Form]], list[tuple[str, Form]]]

DATA = Path(__file__).parents[4] / "shared" / "data"
ALL = os.environ.get("HACRL_ALL_GOLDS") == "1"
FILES = sorted(DATA.glob("*.jsonl"))

pytestmark = pytest.mark.skipif(not FILES, reason="no benchmark data beside the checkout")


def golds_of(path: Path) -> list[str]:
    """The file's different gold answers, in order, without the two empty ones of MATH."""
    with path.open(encoding="utf-8") as lines:
        golds = [gold for gold in dict.fromkeys(json.loads(line)["answer"] for line in lines) if gold]
    return golds if ALL else golds[:: max(1, len(golds) // 15)]


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Judges (gold, name of the form, content of the box) and puts the label before each."""
    with MathVerifier(VerifierSettings(workers=2 if ALL else 1, time_limit=60.0)) as verifier:

        def judge(forms: list[Form]) -> list[tuple[str, Form]]:
            verdicts = verifier.verify([(gold, rf"Thus $\boxed{{{answer}}}$.") for gold, _, answer in forms])
            return [(verdict.label, form) for verdict, form in zip(verdicts, forms, strict=True)]

        yield judge


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golds_accept_themselves_in_equivalent_forms(path: Path, judge: Judge):
    pairs = [(gold, name, form) for gold in golds_of(path) for name, form in equivalent(gold).items()]
    refused = [row for row in judge(pairs) if row[0] != "correct"]
    print(f"\n{path.stem}: {len(pairs) - len(refused)} of {len(pairs)} equivalent forms accepted")
    assert refused == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golds_refuse_wrong_answers(path: Path, judge: Judge):
    pairs = [(gold, name, form) for gold in golds_of(path) for name, form in wrong(gold).items()]
    accepted = [row for row in judge(pairs) if row[0] == "correct"]
    print(f"\n{path.stem}: {len(accepted)} of {len(pairs)} wrong answers accepted")
    assert accepted == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golds_refuse_the_next_problems_answer(path: Path, judge: Judge):
    golds = golds_of(path)
    pairs = [(gold, "next", other) for gold, other in pairwise(golds)]
    accepted = [row for row in judge(pairs) if row[0] == "correct"]
    print(f"\n{path.stem}: {len(accepted)} of {len(pairs)} other problems' answers accepted")
    assert accepted == []
