"""Reward tasks over a few rows, for the tests of reward functions."""

from __future__ import annotations

from hacrl.tasks.rewards import RewardTask
from tests.tasks.helpers import rollout_of

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
    verdicts = task.verify([rollout_of(prompt_of(task, prompt), text) for text in texts])
    assert {one.label for one in verdicts} <= {"scored"}
    return [one.reward for one in verdicts]
