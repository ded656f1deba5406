"""Python reward functions with TRL's signature."""

from __future__ import annotations

import asyncio
import functools
import re

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.base import Rehearsable
from hacrl.tasks.rewards import RewardTask
from hacrl.types import Turn
from tests.tasks.saying import refusal, says

ROWS = [
    {"prompt": "What is 2+2?", "answer": "4", "task": "math"},
    {"prompt": "Say hello.", "answer": None, "task": "talk"},
]


def constant(value):
    def function(completions, **kwargs):
        return [value] * len(completions)

    return function


def task_of(functions, rows=ROWS, **options) -> RewardTask:
    return RewardTask(functions=functions, train=rows, **options)


def prompt_of(task, text: str):
    return next(one for one in task.train if one.prompt == text)


def rewards(task, *texts: str, prompt: str = "What is 2+2?") -> list[float]:
    verdicts = task.verify([says(prompt_of(task, prompt), text) for text in texts])
    assert {one.label for one in verdicts} <= {"scored"}
    return [one.reward for one in verdicts]


def test_a_function_gets_prompts_completions_ids_and_every_column():
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [0.5, -2]

    task = task_of(spy)
    verdicts = task.verify(
        [
            says(prompt_of(task, "What is 2+2?"), "four", (1, 2, 3)),
            says(prompt_of(task, "Say hello."), "", (9,)),
        ]
    )
    assert [(one.reward, one.label) for one in verdicts] == [(0.5, "scored"), (-2.0, "scored")]
    assert seen == {
        "prompts": ["What is 2+2?", "Say hello."],
        "completions": ["four", ""],
        "completion_ids": [[1, 2, 3], [9]],
        "answer": ["4", None],
        "task": ["math", "talk"],
        "trainer_state": None,
    }
    assert task.verify([]) == []


def test_it_is_called_with_what_it_takes():
    def few(completions, task):
        return [len(text) + (kind == "math") for text, kind in zip(completions, task, strict=True)]

    def with_state(completions, trainer_state, log_metric, log_extra, completions_ids, bonus=3.0):
        log_metric("x", 1.0)
        log_extra("y", [1])
        assert trainer_state is None
        return [len(ids) + bonus for ids in completions_ids]

    def with_both(completions, log_extra, **kwargs):
        log_extra("y", [1])
        assert "log_metric" not in kwargs
        return [len(kwargs["completion_ids"][0])]

    class Scorer:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def __call__(self, completions, **kwargs):
            return [self.scale * len(text) for text in completions]

    assert rewards(task_of(few), "abc") == [4.0]
    assert rewards(task_of(with_both), "abc") == [2.0]
    assert rewards(task_of(with_state), "abc") == [5.0]  # two token ids + 3
    assert rewards(task_of(Scorer(0.5)), "abc") == [1.5]
    partial = functools.partial(with_state, bonus=-1.0)
    assert rewards(task_of(partial), "abc") == [1.0]


# The functions of TRL's documentation ("Using a custom reward function"), with its data and its results.
def test_the_examples_of_trls_documentation_by_length():
    def by_tokens(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def by_characters(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    rows = [{"prompt": "The sky is"}, {"prompt": "The sun is"}]
    for function, expected in ((by_tokens, [2.0, 4.0]), (by_characters, [6.0, 12.0])):
        task = task_of(function, rows)
        verdicts = task.verify(
            [
                says(prompt_of(task, "The sky is"), " blue.", (6303, 13)),
                says(prompt_of(task, "The sun is"), " in the sky.", (304, 279, 12884, 13)),
            ]
        )
        assert [one.reward for one in verdicts] == expected


def test_the_examples_of_trls_documentation_in_conversations():
    def format_reward(completions, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        return [
            1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in contents
        ]

    rows = [
        {"prompt": [{"role": "user", "content": "What is the result of (1 + 2) * 4?"}]},
        {"prompt": [{"role": "user", "content": "What is the result of (3 + 1) * 2?"}]},
    ]
    task = task_of(format_reward, rows)
    first, second = (prompt_of(task, row["prompt"][0]["content"]) for row in rows)
    good = "<think>1 and 2 is 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>"
    assert [one.reward for one in task.verify([says(first, good), says(second, "It is 8.")])] == [1.0, 0.0]


def test_the_examples_of_trls_documentation_with_a_reference():
    def reward(completions, ground_truth, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in found]
        return [1.0 if c == gold else 0.0 for c, gold in zip(contents, ground_truth, strict=True)]

    rows = [{"prompt": "2x + 3 = 7", "ground_truth": "2"}, {"prompt": "3x - 5 = 10", "ground_truth": "5"}]
    task = task_of(reward, rows)
    judged = task.verify(
        [
            says(prompt_of(task, "2x + 3 = 7"), r" The solution is \boxed{2}."),
            says(prompt_of(task, "3x - 5 = 10"), r" The solution is \boxed{6}."),
        ]
    )
    assert [one.reward for one in judged] == [1.0, 0.0]


def test_conversations_are_passed_as_messages():
    seen = {}

    def spy(prompts, completions, **kwargs):
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2+2?"},
    ]
    task = task_of(spy, [{"prompt": messages}])
    one = task.train[0]
    assert one.prompt == "2+2?"
    assert one.context == (Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Hello."))
    task.verify([says(one, "4")])
    assert seen == {"prompts": [messages], "completions": [[{"role": "assistant", "content": "4"}]]}


def test_weights_and_functions_that_do_not_apply():
    def maths(completions, task, **kwargs):
        return [len(text) if kind == "math" else None for text, kind in zip(completions, task, strict=True)]

    task = task_of([maths, constant(0.25), constant(True)], weights=[0.5, 2, -1])
    # 0.5 * 3 + 2 * 0.25 - 1 * 1 = 1; where maths does not apply 2 * 0.25 - 1 = -0.5
    assert rewards(task, "abc") == [1.0]
    assert rewards(task, "abc", prompt="Say hello.") == [-0.5]
    assert rewards(task_of([constant(0.25), constant(2)]), "x") == [2.25]
    none = task_of([maths, constant(None)])
    with pytest.raises(
        TaskError, match="reward functions maths, function all returned None for the same response"
    ):
        rewards(none, "abc", prompt="Say hello.")


def test_async_functions_run_side_by_side_even_inside_a_running_loop():
    entered = []

    def waiting(name: str, other: str, value: float):
        async def function(completions, **kwargs):
            entered.append(name)
            while other not in entered:  # one after the other would wait for ever
                await asyncio.sleep(0)
            return [value] * len(completions)

        return function

    task = task_of([waiting("a", "b", 1.0), constant(10), waiting("b", "a", 100.0)])
    try:
        assert rewards(task, "x", "y") == [111.0, 111.0]

        async def notebook():
            return rewards(task, "x")

        assert asyncio.run(notebook()) == [111.0]
    finally:
        task.close()
        task.close()


def test_one_event_loop_serves_all_calls():
    loops = []

    async def function(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    task = task_of(function)
    rewards(task, "x")
    rewards(task, "x")
    assert loops[0] is loops[1]
    task.close()
    assert loops[0].is_closed()


async def _async_failure(completions, **kwargs):
    raise ZeroDivisionError("late")


def _failure(completions, **kwargs):
    raise KeyError("oops")


def _exit(completions, **kwargs):
    raise SystemExit(3)


async def _async_exit(completions, **kwargs):
    raise SystemExit(4)


def line_of(function) -> int:
    return function.__code__.co_firstlineno


def _needs_a_column(completions, answr, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_failure, f"'_failure' raised KeyError: 'oops' (test_rewards.py, line {line_of(_failure) + 1})"),
        (
            _async_failure,
            "'_async_failure' raised ZeroDivisionError: late "
            f"(test_rewards.py, line {line_of(_async_failure) + 1})",
        ),
        (_exit, f"'_exit' raised SystemExit: 3 (test_rewards.py, line {line_of(_exit) + 1})"),
        (
            _async_exit,
            f"'_async_exit' raised SystemExit: 4 (test_rewards.py, line {line_of(_async_exit) + 1})",
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
        (constant(float("nan")), "'function' returned nan for completion 0; rewards must be finite"),
        (constant(float("-inf")), "'function' returned -inf for completion 0; rewards must be finite"),
        (
            constant("1"),
            "'function' returned '1' for completion 0, which is not a number (None: does not apply)",
        ),
        (constant([1.0]), "'function' returned [1.0] for completion 0, which is not a number"),
        (
            _needs_a_column,
            "'_needs_a_column' wants 'answr', which is no column of the data; by keyword it can have "
            "prompts, completions, completion_ids, answer, task, trainer_state; did you mean 'answer'?",
        ),
    ],
)
def test_a_function_that_does_wrong_is_named_in_rehearsal(function, expected: str):
    task = task_of([constant(1.0), function])
    assert isinstance(task, Rehearsable)
    try:
        with pytest.raises(TaskError) as caught:
            task.rehearse()
        with pytest.raises(TaskError):
            rewards(task, "a", "b")
    finally:
        task.close()
    assert str(caught.value).startswith(f"reward function {expected}")


def test_the_users_own_traceback_is_kept():
    with pytest.raises(TaskError) as caught:
        task_of(_failure).rehearse()
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "_failure"


def test_rehearsal_asks_each_function_once_about_two_completions_of_real_rows():
    calls = []

    def spy(prompts, completions, answer, **kwargs):
        calls.append((prompts, completions, answer))
        return [0.0, 1.0]

    task = task_of([spy, spy])
    task.rehearse()
    assert len(calls) == 2
    prompts, completions, answer = calls[0]
    assert sorted(prompts) == sorted(row["prompt"] for row in ROWS)
    assert len(completions) == len(set(completions)) == 2
    assert dict(zip(prompts, answer, strict=True)) == {row["prompt"]: row["answer"] for row in ROWS}
    task_of(constant(0.0), ROWS[:1]).rehearse()  # one row is enough


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
            "train: the rows given: a column is called 'completions', as is an argument of every",
        ),
    ],
)
def test_options_that_do_not_fit(options, expected: str):
    given = {"functions": [constant(1), constant(2)], "train": ROWS, **options}
    assert refusal("reward", **given).startswith(f"task.options.{expected}")


def test_the_range_of_rewards():
    assert task_of(constant(1)).max_reward is None
    task = task_of([constant(0.1), constant(0.2)], reward_range=[0, 0.3])
    assert task.max_reward == 0.3
    assert rewards(task, "x") == [pytest.approx(0.3)]  # 0.1 + 0.2 is a little more than 0.3 in floats
    with pytest.raises(TaskError, match=r"^reward_range=\[0.0, 0.25\]: the reward functions gave 0.3"):
        task_of([constant(0.1), constant(0.2)], reward_range=[0, 0.25]).rehearse()


def test_splits_by_prompt_keep_rows_that_differ_in_other_columns():
    rows = [
        {"prompt": "p", "n": 1},
        {"prompt": "p", "n": 2},
        {"prompt": "p ", "n": 2},
        {"prompt": "q", "n": 1},
    ]
    task = task_of(constant(1), rows)
    assert sorted((one.prompt, one.fields["n"]) for one in task.train) == [("p", 1), ("p", 2), ("q", 1)]
    assert len({one.id for one in task.train}) == 3
    assert (len(task.test), task.notes) == (0, ("1 repeated training question left out",))
    task = task_of(constant(1), rows, test=[{"prompt": "p"}])
    assert [one.prompt for one in task.train] == ["q"]
    many = [{"prompt": f"p{i}"} for i in range(200)]
    assert (
        5 < len(task_of(constant(1), many, test_share=0.2).test) < 80
    )  # 40 expected, standard deviation 5.7


def test_rows_of_datasets_and_columns_by_another_name():
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"question": "a", "gold": {"v": 4}, "completion": "dropped"}])
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        return [1.0] * len(kwargs["completions"])

    task = RewardTask(functions=spy, train=made, columns={"prompt": "question", "answer": "gold.v"})
    assert (task.train[0].prompt, task.train[0].answer) == ("a", "4")
    task.rehearse()
    assert set(seen) == {"prompts", "completions", "completion_ids", "question", "gold", "trainer_state"}
    assert seen["gold"] == [{"v": 4}, {"v": 4}]
