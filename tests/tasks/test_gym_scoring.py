"""Answers that reasoning-gym's own scorers would run, or call right although they are not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from hacrl.tasks.gym.questions import QuestionSource, answer_request
from hacrl.tasks.gym.scoring import ARITHMETIC, EVALUATED_AS_PYTHON, FORMULAS, is_answerable, is_correct

reasoning_gym = pytest.importorskip("reasoning_gym")
factory = pytest.importorskip("reasoning_gym.factory")
# what they evaluate is their own: the gold answer, or an expression of propositional logic
HARMLESS = {"number_sorting", "propositional_logic"}


def first_of(kind: str, **config):
    dataset = reasoning_gym.create_dataset(kind, size=1, seed=0, **config)
    return dataset, dataset[0]


def test_all_kinds_that_call_eval_are_known():
    evaluates = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
    found = {
        kind
        for kind, (dataset, _) in factory.DATASETS.items()
        if evaluates.search(inspect.getsource(dataset.score_answer))
    }
    assert found - HARMLESS == {*EVALUATED_AS_PYTHON, *ARITHMETIC, *FORMULAS}


@pytest.mark.parametrize("kind", [*EVALUATED_AS_PYTHON, *ARITHMETIC, *FORMULAS])
def test_an_answer_is_never_run(kind: str, tmp_path: Path):
    dataset, entry = first_of(kind)
    trace = tmp_path / "trace"
    for program in (f"open({str(trace)!r}, 'w')", f"__import__('os').mkdir({str(trace)!r})"):
        assert not is_correct(dataset, program, entry)
        assert not is_correct(dataset, f"{entry['answer']} + 0*{program}", entry)
    assert not trace.exists()


@pytest.mark.parametrize("kind", [*EVALUATED_AS_PYTHON, *ARITHMETIC, *FORMULAS])
def test_right_answers_stay_right(kind: str):
    dataset = reasoning_gym.create_dataset(kind, size=8, seed=0)
    for entry in filter(is_answerable, dataset):
        assert is_correct(dataset, entry["answer"], entry)


def test_numbers_are_those_given_each_once():
    dataset, entry = first_of("countdown")
    entry["metadata"] |= {"numbers": [67, 50, 20, 82], "target": 119}
    assert is_correct(dataset, "82 + 20 + 67 - 50", entry)
    assert is_correct(dataset, "(82+20)+(67-50)", entry)
    # 67 + 50 + 20 + 82 is 219: what is missing must not come from nowhere
    for ending in ("-0x64", "-1e2", "-len('" + "x" * 100 + "')", "-100", "*0+119", "-10**2", "-1_0*1_0"):
        assert not is_correct(dataset, f"67+50+20+82{ending}", entry)
    entry["metadata"] |= {"numbers": [1, 5, 6], "target": 9}
    assert not is_correct(dataset, "1.5*6", entry)
    entry["metadata"] |= {"numbers": [7, 2], "target": 3}
    assert not is_correct(dataset, "7//2", entry)
    entry["metadata"] |= {"numbers": [2, 3], "target": 8}
    assert not is_correct(dataset, "2**3", entry)


def test_four_other_numbers_do_not_make_24():
    dataset, entry = first_of("puzzle24")
    entry["metadata"] |= {"numbers": [2, 3, 4, 1]}
    assert is_correct(dataset, "2*3*4*1", entry)
    assert dataset.score_answer("6*4*1*1", entry) == 1.0  # by reasoning-gym itself
    assert not is_correct(dataset, "6*4*1*1", entry)


def test_a_formula_may_be_written_otherwise_but_not_as_the_question():
    dataset, entry = first_of("simple_integration")
    entry["metadata"] |= {"variable": "x", "integrand": "2*x + cos(x)"}
    assert is_correct(dataset, "sin(x) + x**2 + C", entry)
    assert is_correct(dataset, "x*x+sin(x)-1.5", entry)
    assert not is_correct(dataset, "x**2 - sin(x) + C", entry)
    assert not is_correct(dataset, "sin(x) + x**2 + hash(3)", entry)  # a function of Python's, not of maths
    assert dataset.score_answer("Integral(2*x + cos(x), x)", entry) == 1.0  # by reasoning-gym itself
    assert not is_correct(dataset, "Integral(2*x + cos(x), x)", entry)


def test_a_question_of_a_composite_is_judged_by_its_own_kind(tmp_path: Path):
    from reasoning_gym.composite import DatasetSpec

    spec = DatasetSpec(name="n_queens", weight=1.0, config={})
    dataset, entry = first_of("composite", datasets=[spec])
    assert is_correct(dataset, entry["answer"], entry)
    assert not is_correct(dataset, f"open({str(tmp_path / 'trace')!r}, 'w')", entry)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("kind", ["game_of_life_halting", "coin_flip"])
def test_a_kind_whose_scorer_takes_one_answer_for_all_is_refused(kind: str):
    request = {"kind": kind, "count": 12, "config": {}, "seed": 0, "avoid": [], "answer": "boxed"}
    message = answer_request(request)["error"]
    start = rf"task\.name: the scorer of gym:{kind} cannot be trusted: it scores '0' as correct for \d of \d "
    assert re.match(start, message)


def test_integrals_without_an_answer_are_not_asked():
    drawn = reasoning_gym.create_dataset("intermediate_integration", size=3, seed=4)
    assert ["Integral" in entry["answer"] for entry in drawn] == [False, True, False]
    source = QuestionSource("intermediate_integration", {}, seed=4)
    assert {entry["question"] for entry in source.draw(2)} == {drawn[0]["question"], drawn[2]["question"]}
