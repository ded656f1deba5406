"""The arithmetic task: its space, its splits, its worked solutions and its judge."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.arithmetic import (
    ArithmeticTask,
    Ranges,
    enumerate_expressions,
    parse_expression,
    worked_solution,
)
from hacrl.tasks.base import Task
from hacrl.types import Problem, Verdict

PROBLEM = Problem("(23+14)*2", "(23+14)*2:", "74")


@pytest.fixture(scope="module")
def task() -> ArithmeticTask:
    return ArithmeticTask()


@pytest.fixture(scope="module")
def whole() -> ArithmeticTask:
    return ArithmeticTask(per_pattern=None)


# --- the space -----------------------------------------------------------------------------------------


def test_a_small_space_holds_exactly_the_expressions_listed_by_hand():
    # One start, one term, one factor: 3 steps first, 3 second. 5+2=7, 5-2=3, 5*2=10, results at most 12:
    # 7: +2=9, -2=5, *2=14 too large; 3: +2=5, -2=1, *2=6; 10: +2=12, -2=8, *2=20 too large.
    space = enumerate_expressions(Ranges(start=(5, 5), term=(2, 2), factor=(2, 2), largest=12))
    assert {e.id for e in space} == {
        "(5+2)+2", "(5+2)-2", "(5-2)+2", "(5-2)-2", "(5-2)*2", "(5*2)+2", "(5*2)-2",
    }  # fmt: skip


def test_intermediate_results_are_bounded_too():
    # 1-2 = -1 is no result, although 1-2+2 = 1 would be; 1*2*2 = 4 is too large.
    # 1+2 = 3 is the largest: +2 and *2 make it too large, -2 is fine. 1*2 = 2: likewise.
    space = enumerate_expressions(Ranges(start=(1, 1), term=(2, 2), factor=(2, 2), largest=3))
    assert [e.id for e in space] == ["(1+2)-2", "(1*2)-2"]


def test_operator_pairs_counted_by_hand(whole: ArithmeticTask):
    counts: dict[str, int] = {}
    for problem in (*whole.train, *whole.test):
        pattern = parse_expression(problem.id).pattern
        counts[pattern] = counts.get(pattern, 0) + 1
    # ++ : at most 39+19+19 = 77, so all 30 starts × 18 × 18 terms.
    # ** : start*4 <= 119 up to 29 (20 starts), start*6 (two ways, 2*3 and 3*2) up to 19 (10 starts each),
    #      start*9 up to 13 (4 starts): 20 + 10 + 10 + 4.
    # *- : start*2 >= 20 and start*3 >= 30 exceed every term, start*3 <= 117: all 30 × 2 × 18.
    # -+ : as many as first differences >= 0: 30 × 18, less those below 0: for start 10 the terms 11..19 (9),
    #      for 11 (8), ... for 18 (1): 540 - 45 = 495; times 18.
    # -* : 495 differences, all at most 37, times 2 factors.
    assert counts["++"] == 30 * 18 * 18 == 9720
    assert counts["**"] == 44
    assert counts["*-"] == 30 * 2 * 18 == 1080
    assert counts["-+"] == 495 * 18 == 8910
    assert counts["-*"] == 495 * 2 == 990


def test_default_keeps_at_most_a_thousand_problems_per_operator_pair(task: ArithmeticTask):
    patterns = [parse_expression(p.id).pattern for p in (*task.train, *task.test)]
    # Whole pairs are smaller only for ** (44), -* (990) and +* (start+term <= 59 for *2, <= 39 for *3):
    # *2: 540 less the sums above 59, i.e. above 39+20 = 58 at most: none, 540; *3: start+term <= 39,
    # for start s the terms 2..39-s: 18 of them up to s=20, then 17, 16, ..., 1 at s=37:
    # 11 × 18 + (17 × 18) / 2 = 198 + 153 = 351; 540 + 351 = 891.
    assert patterns.count("+*") == 891
    assert patterns.count("-*") == 990
    assert patterns.count("**") == 44
    assert {patterns.count(p) for p in ("++", "+-", "-+", "--", "*+", "*-")} == {1000}
    assert len(patterns) == 6 * 1000 + 891 + 990 + 44 == 7925


# --- the splits ----------------------------------------------------------------------------------------


def test_splits_are_disjoint_without_repeats_and_one_in_ten_is_held_out(whole: ArithmeticTask):
    train, test = {p.id for p in whole.train}, {p.id for p in whole.test}
    assert not train & test
    assert len(train) == len(whole.train)
    assert len(test) == len(whole.test)
    # A fair one-in-ten draw of n = 38394 has standard deviation sqrt(n × 0.1 × 0.9) = 59: four of them.
    assert abs(len(test) - len(train | test) / 10) < 4 * 59


def test_the_split_of_a_problem_does_not_depend_on_the_options(task: ArithmeticTask, whole: ArithmeticTask):
    narrow = ArithmeticTask(start=(20, 24), largest=60)
    held_out = {p.id for p in whole.test}
    for other in (task, narrow):
        assert {p.id for p in other.test} <= held_out
        assert not {p.id for p in other.train} & held_out


def test_a_prefix_of_the_test_split_is_a_fair_sample(task: ArithmeticTask):
    # Eight patterns of about 12.5% each: products in about half of the problems, also in the first 200
    # (standard deviation 3.5 points).
    share = sum("*" in p.id for p in task.test[:200]) / 200
    assert 0.36 < share < 0.64


def test_order_and_split_are_the_same_in_another_process_with_another_hash_seed(task: ArithmeticTask):
    code = (
        "import sys; from hacrl.tasks.arithmetic import ArithmeticTask as A; t = A();"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import';"
        "print(len(t.train), len(t.test), *(p.id for p in (*t.train[:20], *t.test[:20])))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert out == [str(len(task.train)), str(len(task.test))] + [
        p.id for p in (*task.train[:20], *task.test[:20])
    ]


def test_the_first_held_out_problem_is_pinned(task: ArithmeticTask):
    # The bundled agents were never taught these: a change of the hash would leak test problems into teaching.
    assert task.test[0] == Problem("(23+9)*3", "(23+9)*3:", "96")
    assert (len(task.train), len(task.test)) == (7162, 763)


# --- worked solutions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem_id", "solution"),
    [
        ("(23+14)*2", "23+14=37;37*2=74#74"),
        ("(10-10)+3", "10-10=0;0+3=3#3"),
        ("(39*3)-19", "39*3=117;117-19=98#98"),
    ],
)
def test_worked_solution(problem_id: str, solution: str):
    assert worked_solution(problem_id) == solution


def test_every_worked_solution_is_judged_correct(whole: ArithmeticTask):
    for problem in whole.test:
        assert whole.judge(problem, worked_solution(problem.id)) == Verdict(1.0, "correct")
        assert problem.prompt == problem.id + ":"


@pytest.mark.parametrize("text", ["", "23+14*2", "(23+14)*2:", "(23+14)/2", "(٢٣+14)*2", "(23+14)*2\n"])
def test_other_ids_are_refused(text: str):
    with pytest.raises(TaskError, match="problem_id"):
        worked_solution(text)


# --- the judge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("23+14=37;37*2=74#74", "correct"),
        ("#74", "correct"),
        ("#75#74", "correct"),  # the last mark counts
        ("#74#75", "wrong"),
        ("#-74", "wrong"),
        ("#7", "wrong"),
        ("#744", "wrong"),
        ("#0", "wrong"),
        ("#" + "7" * 100_000, "wrong"),
        ("", "unparsable"),
        ("74", "unparsable"),
        ("#", "unparsable"),
        ("#74#", "unparsable"),
        ("#74 ", "unparsable"),
        ("# 74", "unparsable"),
        ("#74\n", "unparsable"),
        ("#74\x00", "unparsable"),
        ("#074", "unparsable"),
        ("#-0", "unparsable"),
        ("#+74", "unparsable"),
        ("#74.0", "unparsable"),
        ("#7_4", "unparsable"),
        ("#37*2", "unparsable"),
        ("#７４", "unparsable"),  # full-width digits
        ("#٧٤", "unparsable"),  # Arabic digits
        ("#²", "unparsable"),
        ("\ud800#\udfff", "unparsable"),  # lone surrogates
        ("#" * 1_000_000, "unparsable"),
        ("＃74", "unparsable"),  # full-width mark
    ],
)
def test_verify(task: ArithmeticTask, response: str, label: str):
    assert task.judge(PROBLEM, response) == Verdict(1.0 if label == "correct" else 0.0, label)


# --- the constructor -----------------------------------------------------------------------------------


def test_it_is_a_task(task: ArithmeticTask):
    as_task: Task = task
    assert as_task.name == "arithmetic"


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"start": (9, 3)}, r"start=\(9, 3\)"),
        ({"term": (2,)}, "term="),
        ({"factor": (-1, 3)}, "factor="),
        ({"factor": (1.5, 3)}, "factor="),
        ({"largest": -1}, "largest=-1"),
        ({"per_pattern": 0}, "per_pattern=0"),
        ({"start": (50, 60), "largest": 1}, "only 0 train and 0 test"),
    ],
)
def test_invalid_options_are_named(knobs: dict[str, object], named: str):
    with pytest.raises(TaskError, match=named):
        ArithmeticTask(**knobs)  # type: ignore[arg-type]
