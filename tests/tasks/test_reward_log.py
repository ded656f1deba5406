"""Rewards by function, and what reward functions log with ``log_metric`` and ``log_extra``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hacrl import Callback, HACRLTrainer
from hacrl.errors import TaskError
from hacrl.rollouts.log import RolloutLog
from hacrl.tracking.samples import as_text, sample_rows
from hacrl.tracking.scalars import step_scalars
from hacrl.training.learn_stats import LearnStats
from hacrl.training.metrics import AgentReport, RewardReport, StepReport, learn_report, rollout_report
from hacrl.training.samples import LearnerSamples
from hacrl.types import VerifiedRollout
from tests.api.conftest import ROWS, has_digit, small
from tests.support.tiny import save_agents
from tests.tasks.helpers import rollout_of
from tests.tasks.reward_tasks import prompt_of, task_of


def maths(completions, task, **kwargs):
    """Number of characters of answers to mathematical questions."""
    return [len(text) if kind == "math" else None for text, kind in zip(completions, task, strict=True)]


def brief(completions, log_metric, log_extra, **kwargs):
    """0.5 each; logs the mean length twice, once doubled."""
    length = sum(map(len, completions)) / len(completions)
    log_metric("length", length)
    log_metric("length", 2 * length)
    log_metric("nothing", float("nan"))
    log_extra("first", [text[:1] for text in completions])
    return [0.5] * len(completions)


async def late(completions, log_metric, **kwargs):
    log_metric("late", True)
    return [None] * len(completions)


def judged(task, *answers: tuple[str, str]) -> list[VerifiedRollout]:
    rollouts = [rollout_of(prompt_of(task, prompt), text) for prompt, text in answers]
    return [VerifiedRollout(*pair) for pair in zip(rollouts, task.verify(rollouts), strict=True)]


def three_responses() -> list[VerifiedRollout]:
    """Two to the mathematical question, of 1 and 4 characters, and one of 7 to the other."""
    task = task_of(
        [maths, brief, late, lambda completions, **_: [0] * len(completions)], weights=[2, 1, 1, 0]
    )
    with_answers = judged(task, ("What is 2+2?", "4"), ("What is 2+2?", "four"), ("Say hello.", "goodbye"))
    task.close()
    return with_answers


def test_a_verdict_has_every_function_s_value_and_what_was_logged():
    verdicts = [one.verdict for one in three_responses()]
    assert [one.reward for one in verdicts] == [2.5, 8.5, 0.5]  # 2 * characters + 0.5
    assert [one.rewards for one in verdicts] == [
        {"maths": 1.0, "brief": 0.5, "late": None, "lambda": 0.0},
        {"maths": 4.0, "brief": 0.5, "late": None, "lambda": 0.0},
        {"maths": None, "brief": 0.5, "late": None, "lambda": 0.0},
    ]
    assert [one.columns for one in verdicts] == [{"first": "4"}, {"first": "f"}, {"first": "g"}]
    # lengths 1, 4 and 7: their mean is 4; logged are 4 and 8
    assert all(one.metrics == {"late": 1.0, "length": 6.0} for one in verdicts)


def test_mean_and_deviation_of_each_function():
    report = rollout_report(three_responses())
    assert report.rewards == {
        # (1 + 4) / 2; deviations of 1.5, so sqrt(2 * 1.5^2 / (2 - 1)) = sqrt(4.5)
        "maths": RewardReport(2.5, pytest.approx(4.5**0.5), 2),
        "brief": RewardReport(0.5, 0.0, 3),
        "late": RewardReport(None, None, 0),
        "lambda": RewardReport(0.0, 0.0, 3),
    }
    assert report.logged == {"late": 1.0, "length": 6.0}


def test_trackers_get_them_under_names_that_they_accept():
    task = task_of([lambda completions, log_metric, **_: log_metric("a|b\n", 3) or [1.0] * len(completions)])
    learning = learn_report("ada", LearnStats(), LearnerSamples([]))
    rollouts = judged(task, ("What is 2+2?", "4"))
    report = StepReport(1, {"ada": AgentReport(0.5, 0, rollout_report(rollouts), learning)})
    scalars = step_scalars(report, {})
    assert scalars["ada/rewards/lambda/mean"] == 1.0
    assert scalars["ada/rewards/lambda/rollouts"] == 1.0
    assert "ada/rewards/lambda/std" not in scalars  # of one value
    assert scalars["ada/logged/a_b_n"] == 3.0
    [row] = sample_rows(1, "ada", three_responses(), 1)
    assert json.loads(row.details) == {
        "rewards": {"maths": 1.0, "brief": 0.5, "late": None, "lambda": 0.0},
        "first": "4",
    }
    assert f"--- details\n{row.details}\n" in as_text([row])


def test_functions_of_one_name_are_told_apart():
    task = task_of([lambda completions, n=n, **_: [n] * len(completions) for n in (1.0, 2.0)])
    [one] = judged(task, ("What is 2+2?", "4"))
    assert one.verdict.rewards == {"lambda": 1.0, "lambda_2": 2.0}


def test_values_that_json_lacks_are_logged_as_numbers_or_text():
    import numpy as np

    def logs(completions, log_extra, **_):
        log_extra("kinds", [np.float32(0.5), {1}])
        return [0.0] * len(completions)

    first, second = judged(task_of(logs), ("What is 2+2?", "4"), ("What is 2+2?", "5"))
    assert (first.verdict.columns, second.verdict.columns) == ({"kinds": 0.5}, {"kinds": "{1}"})


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda log_metric, log_extra: log_extra("x", [1]),
            "log_extra('x', ...): 1 values for 2 completions",
        ),
        (lambda log_metric, log_extra: log_extra("x", "ab"), "log_extra('x', ...): give a list with one"),
        (
            lambda log_metric, log_extra: log_metric("x", "1"),
            "log_metric('x', ...): the value must be a numb",
        ),
    ],
)
def test_a_wrong_call_names_the_function_and_its_line(call: Any, words: str):
    def logs(completions, log_metric, log_extra, **_):
        call(log_metric, log_extra)

    with pytest.raises(TaskError) as caught:
        task_of(logs).self_test()
    assert f"reward function 'logs' raised ValueError: {words}" in str(caught.value)
    assert f"(test_reward_log.py, line {call.__code__.co_firstlineno})" in str(caught.value)


def sevens(completions, log_metric, log_extra, **_):
    log_metric("sevens", sum(text.count("7") for text in completions))
    log_extra("text", completions)
    return [float("7" in text) for text in completions]


def test_a_run_writes_them_and_a_resumed_run_reads_them_from_the_log(tmp_path: Path):
    class CrashError(Exception):
        pass

    class CrashAfterSampling(Callback):
        def on_phase(self, step, phase, agent):
            if (step, phase) == (2, "learn"):
                raise CrashError

    def trainer(name: str, **changes: Any) -> HACRLTrainer:
        callbacks = [CrashAfterSampling()] if changes.pop("crashes", False) else []
        args = small(tmp_path / name, checkpoint={"every": 1, "background": False}, **changes)
        return HACRLTrainer(
            models,
            reward_funcs=[has_digit, sevens],
            train_dataset=ROWS,
            args=args,
            callbacks=callbacks,
        )

    models = save_agents(tmp_path / "models")
    trainer("whole").train()
    with pytest.raises(CrashError):
        trainer("resumed", crashes=True).train()
    trainer("resumed", resume=True).train()
    metrics = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "resumed" / "metrics.jsonl").read_bytes() == metrics
    log = RolloutLog(tmp_path / "whole" / "rollouts")
    for line in map(json.loads, metrics.splitlines()):
        for name, agent in line["agents"].items():
            rows = list(log.read(line["step"], name))
            reported = agent["rollout"]["rewards"]
            assert list(reported) == ["has_digit", "sevens"]
            share = sum("7" in row["text"] for row in rows) / len(rows)
            assert reported["sevens"]["mean"] == pytest.approx(share)
            assert agent["rollout"]["logged"] == {"sevens": sum(row["text"].count("7") for row in rows)}
            assert agent["rollout"]["reward"] == pytest.approx(
                reported["has_digit"]["mean"] + reported["sevens"]["mean"]
            )
            assert all(row["columns"] == {"text": row["text"]} for row in rows)
