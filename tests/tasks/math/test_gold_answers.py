"""Every gold answer accepts itself in equivalent forms, and none of its corruptions.

The gold answers are of all forms that answers have, and a sample of benchmark files beside the checkout.
HACRL_ALL_GOLDS=1 takes all of the files' (an hour; benchmarks/verifier.py compares with math-verify, too).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from hacrl.config.schema import VerifierSettings
from hacrl.tasks.math.pool import MathVerifier
from tests.tasks.math.corruptions import KINDS, corruptions
from tests.tasks.math.forms import equivalent
from tests.tasks.math.golds import FILES, OF_ALL_FORMS, golds_of

Form = tuple[str, str, str]
Judge = Callable[[list[Form]], list[tuple[str, Form]]]

ALL = os.environ.get("HACRL_ALL_GOLDS") == "1"
SAMPLE = 15  # of each file


def _sample(golds: list[str]) -> list[str]:
    return golds if ALL else golds[:: max(1, len(golds) // SAMPLE)]


GOLDS = {"all forms": list(OF_ALL_FORMS)} | {path.stem: _sample(golds_of(path)) for path in FILES}


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Judges (gold, name of the form, content of the box) and puts the label before each."""
    with MathVerifier(VerifierSettings(workers=2 if ALL else 1, time_limit=60.0)) as verifier:

        def judge(forms: list[Form]) -> list[tuple[str, Form]]:
            verdicts = verifier.verify([(gold, rf"Thus $\boxed{{{answer}}}$.") for gold, _, answer in forms])
            return [(verdict.label, form) for verdict, form in zip(verdicts, forms, strict=True)]

        yield judge


@pytest.mark.parametrize("name", GOLDS)
def test_golds_accept_themselves_in_equivalent_forms(name: str, judge: Judge):
    pairs = [(gold, form, answer) for gold in GOLDS[name] for form, answer in equivalent(gold).items()]
    refused = [row for row in judge(pairs) if row[0] != "correct"]
    print(f"\n{name}: {len(pairs) - len(refused)} of {len(pairs)} equivalent forms accepted")
    assert refused == []


@pytest.mark.parametrize("name", GOLDS)
def test_golds_refuse_their_corruptions(name: str, judge: Judge):
    pairs = [(gold, kind, answer) for gold in GOLDS[name] for kind, answer in corruptions(gold)]
    accepted = [row for row in judge(pairs) if row[0] == "correct"]
    print(f"\n{name}: {len(accepted)} of {len(pairs)} corruptions accepted")
    assert accepted == []


@pytest.mark.parametrize("name", GOLDS)
def test_golds_refuse_the_next_problems_answer(name: str, judge: Judge):
    pairs = [(gold, "next", other) for gold, other in pairwise(GOLDS[name])]
    accepted = [row for row in judge(pairs) if row[0] == "correct"]
    print(f"\n{name}: {len(accepted)} of {len(pairs)} other problems' answers accepted")
    assert accepted == []


def test_corruptions_are_of_every_kind_and_the_same_for_one_seed():
    changes = [change for gold in OF_ALL_FORMS for change in corruptions(gold)]
    assert {kind for kind, _ in changes} == set(KINDS)
    assert changes == [change for gold in OF_ALL_FORMS for change in corruptions(gold)]
    assert changes != [change for gold in OF_ALL_FORMS for change in corruptions(gold, seed=1)]
    assert ("sign", "-(72)") in changes
    assert ("dropped part", "2, 5, 787") in changes
