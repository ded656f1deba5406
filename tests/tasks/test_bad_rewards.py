"""Reward functions and options that do wrong are named before any weights load."""

from __future__ import annotations

import itertools
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hacrl.errors import TaskError
from hacrl.tasks.base import SelfTesting
from tests.tasks.helpers import refusal
from tests.tasks.reward_tasks import ROWS, constant, rewards, task_of


def _failure(completions, **kwargs):
    raise KeyError("oops")


async def _async_failure(completions, **kwargs):
    raise ZeroDivisionError("late")


def _exit(completions, **kwargs):
    raise SystemExit(3)


async def _async_exit(completions, **kwargs):
    raise SystemExit(4)


def _late(completions, **kwargs):
    yield 1.0
    raise KeyError("late")


def _endless(completions, **kwargs):
    return itertools.repeat(1.0)


class _Unfit:
    """A reward function that returns itself: a number whose every method raises."""

    def __call__(self, completions, **kwargs):
        return [self] * len(completions)

    def __float__(self):
        raise ZeroDivisionError

    __repr__ = __float__


def line_of(function) -> int:
    return function.__code__.co_firstlineno


def _needs_a_column(completions, answr, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            _failure,
            f"'_failure' raised KeyError: 'oops' (test_bad_rewards.py, line {line_of(_failure) + 1})",
        ),
        (
            _async_failure,
            "'_async_failure' raised ZeroDivisionError: late "
            f"(test_bad_rewards.py, line {line_of(_async_failure) + 1})",
        ),
        (_exit, f"'_exit' raised SystemExit: 3 (test_bad_rewards.py, line {line_of(_exit) + 1})"),
        (
            _async_exit,
            f"'_async_exit' raised SystemExit: 4 (test_bad_rewards.py, line {line_of(_async_exit) + 1})",
        ),
        (
            lambda completions, **_: [1.0],
            "'<lambda>' returned 1 values for 2 completions; it must return one each",
        ),
        (
            lambda completions, **_: 1.0,
            "'<lambda>' returned float; it must return a list with one number per completion",
        ),
        (lambda completions, **_: None, "'<lambda>' returned NoneType; it must"),
        (lambda completions, **_: "ab", "'<lambda>' returned str; it must"),
        (
            constant(float("nan")),
            "'function' returned nan for completion 0 of problem 'PROMPT'; rewards must be finite "
            "(None: the function does not apply)",
        ),
        (
            constant(float("-inf")),
            "'function' returned -inf for completion 0 of problem 'PROMPT'; rewards must be finite",
        ),
        (constant(10**400), "'function' returned 1000"),
        (constant(-(10**5000)), "'function' returned a number of thousands of digits for completion 0 of"),
        (constant(Decimal("1e400")), "'function' returned Decimal('1E+400') for completion 0 of"),
        (constant(Decimal("sNaN")), "'function' returned Decimal('sNaN') for completion 0 of"),
        (constant(1e155 * 1j), "'function' returned 1e+155j for completion 0 of"),
        (constant(-1.1e100), "'function' returned -1.1e+100 for completion 0 of problem 'PROMPT'; rewards"),
        (_Unfit(), "'_Unfit' returned <_Unfit instance"),
        (
            constant("1"),
            "'function' returned '1' for completion 0 of problem 'PROMPT', which is neither a number nor",
        ),
        (
            constant([1.0]),
            "'function' returned [1.0] for completion 0 of problem 'PROMPT', which is neither a",
        ),
        (_late, f"'_late' raised KeyError: 'late' (test_bad_rewards.py, line {line_of(_late) + 2})"),
        (_endless, "'_endless' returned at least 3 values for 2 completions; it must return one each"),
        (
            _needs_a_column,
            "'_needs_a_column' takes 'answr', which is not a column of the data; the keyword arguments are "
            "prompts, completions, completion_ids, answer, task, trainer_state, log_metric, log_extra; "
            "did you mean 'answer'?",
        ),
    ],
)
def test_the_self_test_names_a_broken_function(function, expected: str):
    task = task_of([constant(1.0), function])
    assert isinstance(task, SelfTesting)
    try:
        with pytest.raises(TaskError) as caught:
            task.self_test()
        with pytest.raises(TaskError):
            rewards(task, "a", "b")
    finally:
        task.close()
    expected = expected.replace("PROMPT", task.train[0].prompt)
    assert str(caught.value).startswith(f"reward function {expected}")


def test_the_users_own_traceback_is_kept():
    with pytest.raises(TaskError) as caught:
        task_of(_failure).self_test()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "_failure"


def test_the_self_test_calls_each_function_once_with_two_completions_of_real_rows():
    calls = []

    def spy(prompts, completions, answer, **kwargs):
        calls.append((prompts, completions, answer))
        return [0.0, 1.0]

    task = task_of([spy, spy])
    task.self_test()
    assert len(calls) == 2
    prompts, completions, answer = calls[0]
    assert sorted(prompts) == sorted(row["prompt"] for row in ROWS)
    assert len(completions) == len(set(completions)) == 2
    assert dict(zip(prompts, answer, strict=True)) == {row["prompt"]: row["answer"] for row in ROWS}
    task_of(constant(0.0), ROWS[:1]).self_test()  # one row is enough


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"functions": []}, "functions: give at least one"),
        ({"weights": [1.0]}, "weights=[1.0]: give 2, one for each of functions"),
        ({"weights": [1.0, "2"]}, "weights=[1.0, '2']: '2' is not a finite number"),
        ({"reward_range": [1, 0]}, "reward_range=[1, 0]: the first must be smaller than the second"),
        ({"reward_range": 1}, "reward_range=1: give two numbers, [smallest, largest]"),
        ({"limit": -1}, "limit=-1: must be a whole number"),
        (
            {"train": [{"promt": "x"}]},
            "train: the rows given: has no column 'prompt'; it has promt; did you mean 'promt'?",
        ),
        (
            {"train": [{"prompt": " "}]},
            "train: the rows given, row 1: column 'prompt' is empty; every row needs a prompt",
        ),
        (
            {"train": [{"prompt": 3}]},
            "train: the rows given, row 1: column 'prompt' must be text or a list of messages",
        ),
        (
            {"train": [{"prompt": [{"role": "robot", "content": "x"}]}]},
            "train: the rows given, row 1: column 'prompt' must",
        ),
        (
            {"train": [{"prompt": [{"role": "assistant", "content": "x"}]}]},
            "train: the rows given, row 1: the last message of column 'prompt' must be the user's",
        ),
        (
            {"train": [{"prompt": "x"}, {"prompt": [{"role": "user", "content": "x"}]}]},
            "train: the rows given, row 2: prompts must be all text or all lists of messages, not both",
        ),
        (
            {"train": [{"prompt": "x", "completions": 1}]},
            "train: the rows given: column 'completions' has the name of an argument of every",
        ),
    ],
)
def test_invalid_options_are_named(options, expected: str):
    given = {"functions": [constant(1), constant(2)], "train": ROWS, **options}
    assert refusal("reward", **given).startswith(f"task.options.{expected}")


def test_a_weighted_sum_that_is_too_large_is_named():
    task = task_of([constant(1e60), constant(1.0)], weights=[1e60, 1.0])
    with pytest.raises(TaskError) as caught:
        task.self_test()
    assert str(caught.value) == (
        "reward functions function, function with weights [1e+60, 1.0] gave 1e+120 for a response to "
        f"problem {task.train[0].prompt!r}; rewards must be between -1e+100 and 1e+100"
    )
    with pytest.raises(TaskError, match=r"gave inf for a response to problem '.*rewards must be finite"):
        task_of(constant(1e60), weights=[1e300]).self_test()


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (10**99, 1e99),
        (Decimal("0.25"), 0.25),
        (Fraction(1, 4), 0.25),
        (np.float32(0.1), 0.10000000149011612),  # 0.1 rounded to float32, which a float holds exactly
        (np.float16(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.bool_(True), 1.0),
        (np.array(2.5), 2.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([2.5], dtype=torch.bfloat16), 2.5),
        (1e100, 1e100),
        (5e-324, 5e-324),
    ],
)
def test_numbers_of_any_library_are_rewards(value, reward):
    given = rewards(task_of(constant(value)), "a", "b")
    assert given == [reward, reward]
    assert {type(one) for one in given} == {float}


def test_arrays_and_generators_of_rewards():
    for listed in (np.array([0.5, 2.0]), torch.tensor([0.5, 2.0]), (0.5, 2.0), iter([0.5, 2.0])):
        assert rewards(task_of(lambda listed=listed, **_: listed), "a", "b") == [0.5, 2.0]
