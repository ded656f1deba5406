"""Python reward functions with TRL's signature."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import os
import re
import subprocess
import sys
import warnings

import pytest

from hacrl.errors import TaskError
from hacrl.tasks.rewards import RewardTask
from hacrl.types import Turn
from tests.tasks.helpers import rollout_of
from tests.tasks.reward_tasks import constant, prompt_of, rewards, task_of


def test_a_function_gets_prompts_completions_ids_and_every_column():
    seen = {}

    def spy(**kwargs):
        seen.update(kwargs)
        assert callable(seen.pop("log_metric"))
        assert callable(seen.pop("log_extra"))
        return [0.5, -2]

    task = task_of(spy)
    verdicts = task.verify(
        [
            rollout_of(prompt_of(task, "What is 2+2?"), "four", (1, 2, 3)),
            rollout_of(prompt_of(task, "Say hello."), "", (9,)),
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


def test_a_function_gets_only_the_arguments_that_it_takes():
    def few(completions, task):
        return [len(text) + (kind == "math") for text, kind in zip(completions, task, strict=True)]

    def with_state(completions, trainer_state, log_metric, log_extra, completions_ids, bonus=3.0):
        log_metric("x", 1.0)
        log_extra("y", [1])
        assert trainer_state is None
        return [len(ids) + bonus for ids in completions_ids]

    def with_both(completions, log_extra, **kwargs):
        log_extra("y", [1])
        kwargs["log_metric"]("x", 1.0)
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
                rollout_of(prompt_of(task, "The sky is"), " blue.", (6303, 13)),
                rollout_of(prompt_of(task, "The sun is"), " in the sky.", (304, 279, 12884, 13)),
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
    assert [one.reward for one in task.verify([rollout_of(first, good), rollout_of(second, "It is 8.")])] == [
        1.0,
        0.0,
    ]


def test_the_examples_of_trls_documentation_with_a_reference():
    def reward(completions, ground_truth, **kwargs):
        found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
        contents = [match.group(1) if match else "" for match in found]
        return [1.0 if c == gold else 0.0 for c, gold in zip(contents, ground_truth, strict=True)]

    rows = [{"prompt": "2x + 3 = 7", "ground_truth": "2"}, {"prompt": "3x - 5 = 10", "ground_truth": "5"}]
    task = task_of(reward, rows)
    judged = task.verify(
        [
            rollout_of(prompt_of(task, "2x + 3 = 7"), r" The solution is \boxed{2}."),
            rollout_of(prompt_of(task, "3x - 5 = 10"), r" The solution is \boxed{6}."),
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
    task.verify([rollout_of(one, "4")])
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


def test_the_range_of_rewards():
    assert task_of(constant(1)).max_reward is None
    task = task_of([constant(0.1), constant(0.2)], reward_range=[0, 0.3])
    assert task.max_reward == 0.3
    assert rewards(task, "x") == [pytest.approx(0.3)]  # 0.1 + 0.2 is a little more than 0.3 in floats
    with pytest.raises(TaskError, match=r"^reward_range=\[0.0, 0.25\]: the reward functions gave 0.3"):
        task_of([constant(0.1), constant(0.2)], reward_range=[0, 0.25]).self_test()


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
    task.self_test()
    columns = {"question", "gold"}
    always = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
    assert set(seen) == columns | always
    assert seen["gold"] == [{"v": 4}, {"v": 4}]


def test_a_coroutine_is_closed_if_another_function_raises():
    async def late(completions, **_):
        return [0.0] * len(completions)

    def broken(completions, **_):
        raise KeyError("oops")

    task = RewardTask(functions=[late, broken], train=[{"prompt": "What is 2+2?"}])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TaskError, match="'broken' raised KeyError"):
            task.verify([rollout_of(task.train[0], "4")])
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    task.close()


PRINT_IDS = """
from hacrl.tasks.rewards import RewardTask
class Checker:  # its repr has an address
    pass
rows = [{"prompt": f"{i} + 1", "checker": Checker(), "words": {"one", "two", "three"}} for i in range(6)]
waste = [object() for _ in range(%d)]
task = RewardTask(functions=lambda completions, **_: [0.0], train=rows)
print([(one.prompt, one.id) for one in task.train])
"""


def test_equal_data_has_equal_ids_and_order_in_every_process():
    def printed(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", PRINT_IDS % (seed * 1000)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert printed(1) == printed(2)


def test_rows_that_differ_in_an_object_only_are_all_kept():
    rows = [{"prompt": "Say seven.", "level": 3, "checker": object(), "pair": (1, 2)} for _ in range(3)]
    given = []

    def reward(completions, level, checker, pair, **_):
        given.extend(zip(level, checker, pair, strict=True))
        return [0.0] * len(completions)

    task = RewardTask(functions=reward, train=rows)
    assert len({one.id for one in task.train}) == 3
    # fields hold plain JSON only; the function gets every column as it was given
    assert [one.fields for one in task.train] == [{"level": 3}] * 3
    task.verify([rollout_of(one, "7") for one in task.train])
    assert {id(checker) for _, checker, _ in given} == {id(row["checker"]) for row in rows}
    assert [(level, pair) for level, _, pair in given] == [(3, (1, 2))] * 3


def test_a_function_that_edits_its_arguments_changes_nothing_else():
    """Neither for other responses to the prompt, nor for other functions, nor in later calls."""
    seen = []

    def edits(prompts, completions, completion_ids, meta, tags, **kwargs):
        seen.append(copy.deepcopy([*completion_ids, *meta, tags[0]]))
        for values in (completion_ids[0], meta[0]["steps"]):
            values.append(99)
        meta[0]["gold"] = "edited"
        tags[0].add("edited")
        prompts[0][0]["content"] = completions[0][0]["content"] = "edited"
        prompts.clear()
        return [1.0, 2.0]

    def reads(prompts, completions, meta, **kwargs):
        texts = [message["content"] for message in (*prompts[0], *completions[0])]
        return [float(texts == ["2+2?", "4"] and meta[0] == META), 0.0]

    async def reads_late(prompts, completions, meta, **kwargs):
        await asyncio.sleep(0)
        return reads(prompts, completions, meta)

    META = {"gold": "4", "steps": [1, 2]}
    rows = [{"prompt": [{"role": "user", "content": "2+2?"}], "meta": dict(META), "tags": {"a"}}]
    task = task_of([edits, reads, reads_late], rows)
    [one] = task.train
    for _ in range(2):  # 1 + 1 + 1 for the first response, 2 for the second
        assert [v.reward for v in task.verify([rollout_of(one, "4"), rollout_of(one, "5")])] == [3.0, 2.0]
    task.close()
    assert seen[0] == seen[1] == [[5, 6], [5, 6], META, META, {"a"}]
    assert rows[0]["meta"] == META
