"""``gym:NAME`` as a task: splits, prompts, and processes that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hacrl.config.schema import TaskSettings
from hacrl.processes import LONGEST_MESSAGE
from hacrl.tasks.gym.formats import FORMATS
from hacrl.tasks.gym.processes import draw_questions
from hacrl.tasks.registry import make_task
from hacrl.tasks.splits import question_key
from hacrl.types import Turn
from tests.tasks.helpers import build, refusal, rollout_of

pytest.importorskip("reasoning_gym")
SMALL = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 1,
    "max_digits": 1,
}  # 200 questions, see test_gym_questions
ENDING = FORMATS["boxed"].prompt.removeprefix("{problem}")


@pytest.fixture(scope="module")
def sums():
    task = build("gym:chain_sum", size=150, test_size=48, config=SMALL, demonstrations=2, system="Add.")
    yield task
    task.close()


def questions(problems) -> list[str]:
    return [question_key(one.prompt.removesuffix(ENDING)) for one in problems]


def labels(task, problem, *answers: str) -> list[str]:
    verdicts = task.verify([rollout_of(problem, text) for text in answers])
    assert all(one.reward == (1.0 if one.label == "correct" else 0.0) for one in verdicts)
    return [one.label for one in verdicts]


def worked_out(question: str) -> int:
    """``State the final answer to the following arithmetic problem: 4 - 1 =`` is 3."""
    left, operator, right, _ = question.split(": ")[1].split()
    return int(left) + int(right) if operator == "+" else int(left) - int(right)


def test_train_test_and_demonstrations_share_no_question(sums):
    assert (sums.name, sums.max_reward, len(sums.train), len(sums.test)) == ("gym:chain_sum", 1.0, 150, 48)
    shown = [question_key(turn.content.removesuffix(ENDING)) for turn in sums.train[0].context[1::2]]
    assert len({*questions(sums.train), *questions(sums.test), *shown}) == 200
    assert len({one.id for one in (*sums.train, *sums.test)}) == 198
    assert sums.notes[0].startswith("200 different questions took ")


def test_answers_are_right_and_demonstrations_too(sums):
    for one in (*sums.train, *sums.test):
        assert one.answer == str(worked_out(one.prompt.removesuffix(ENDING)))
    system, *turns = sums.train[0].context
    assert system == Turn("system", "Add.")
    assert [turn.role for turn in turns] == ["user", "assistant", "user", "assistant"]
    for question, solution in zip(turns[::2], turns[1::2], strict=True):
        value = worked_out(question.content.removesuffix(ENDING))
        assert solution.content == f"The answer is \\boxed{{{value}}}."
    assert {one.context for one in (*sums.train, *sums.test)} == {(system, *turns)}


def test_strict_verdicts(sums):
    one = sums.test[0]
    given = [
        f"So \\boxed{{{one.answer}}}.",
        f"\\boxed{{is {one.answer}}}",
        one.answer,
        "\\boxed{99}",
        "\\boxed{",
    ]
    assert labels(sums, one, *given) == ["correct", "wrong", "unparsable", "wrong", "unparsable"]
    assert sums.verify([]) == []


def test_formats_carry_the_answer():
    read = {name: form.extract for name, form in FORMATS.items()}
    for name, form in FORMATS.items():
        assert read[name](form.write(" 12 ")) == "12"
    assert read["last_line"]("Hm.\n 7 \n\n") == "7"
    assert read["last_line"]("7\nthat is it") == "that is it"
    assert read["raw"](" a\nb ") == "a\nb"
    assert [form("") for form in read.values()] == [None, None, None]
    task = build("gym:gcd", size=2, test_size=1, answer="raw", prompt="Now: {problem}")
    one = task.train[0]
    assert one.prompt.startswith("Now: Find the Greatest Common Divisor")
    try:
        assert labels(task, one, f" {one.answer}\n", f"\\boxed{{{one.answer}}}", " ") == [
            "correct",
            "wrong",
            "unparsable",
        ]
    finally:
        task.close()


def test_a_scorer_that_hangs_or_dies_costs_one_verdict():
    settings = TaskSettings(
        name="gym:polynomial_multiplication",
        options={"size": 2, "test_size": 1, "verifier": {"time_limit": 4.0}},
    )
    task = make_task(settings)
    one = task.train[0]
    right = f"\\boxed{{{one.answer}}}"
    try:
        # sympy evaluates it; the child is killed and another one judges the rest
        assert labels(task, one, right, "\\boxed{9**9**9**9**9}", "\\boxed{1}") == [
            "correct",
            "timeout",
            "wrong",
        ]
        task._scorer._child._process.kill()
        assert labels(task, one, right, right) == ["crash", "crash"]  # asked once, said twice
        assert labels(task, one, right) == ["correct"]
        child = task._scorer._child
        assert child.exit_code is None
    finally:
        task.close()
        task.close()
    assert child.exit_code is not None


def test_a_closed_task_leaves_no_process_behind():
    task = build("gym:gcd", size=2, test_size=1)
    task.close()  # nothing started yet
    labels(task, task.train[0], "\\boxed{1}")
    pid = task._scorer._child.pid
    assert Path(f"/proc/{pid}").exists()
    del task
    assert not Path(f"/proc/{pid}").exists()


def test_the_users_demonstrations_are_in_no_split():
    own = [
        {"problem": "State the final answer to the following arithmetic problem: 1 + 1 =", "solution": "2"}
    ]
    task = build("gym:chain_sum", size=198, test_size=1, config=SMALL, demonstrations=own)
    assert task.train[0].context == (Turn("user", own[0]["problem"] + ENDING), Turn("assistant", "2"))
    asked = {*questions(task.train), *questions(task.test)}
    assert len(asked) == 199
    assert own[0]["problem"] not in asked


def test_questions_do_not_depend_on_the_process():
    """reasoning-gym alone asks other questions of this kind in every process: by the order of its sets."""
    code = (
        "from hacrl.tasks.gym.task import GymTask; t = GymTask('ransom_note', size=8, test_size=2); "
        "print([(p.id, p.answer) for p in (*t.train, *t.test)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert runs[0] == runs[1]
    assert runs[0].count("(") == 10


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("chain_som", {}, "task.name: reasoning-gym has no 'chain_som'; did you mean 'chain_sum'"),
        (
            "chain_sum",
            {"config": {"min_term": 2}},
            "task.options.config.min_term: unknown setting of gym:chain_sum",
        ),
        (
            "graph_color",
            {"size": 2, "demonstrations": 1},
            "task.options.demonstrations: gym:graph_color has no answers",
        ),
        (
            "chain_sum",
            {"config": [1]},
            "task.options.config=[1]: must map settings of gym:chain_sum to values",
        ),
        ("chain_sum", {"size": 0}, "task.options.size=0: must be a whole number of at least 1"),
        ("chain_sum", {"seed": -1}, "task.options.seed=-1: must be a whole number of at least 0"),
        ("chain_sum", {"answer": "xml"}, "task.options.answer='xml': must be one of boxed, last_line, raw"),
        ("chain_sum", {"prompt": "?"}, "task.options.prompt='?': must be text that contains {problem}"),
        (
            "chain_sum",
            {"demonstrations": [1]},
            "task.options.demonstrations: entry 1 must be {problem: TEXT, ",
        ),
        (
            "chain_sum",
            {"demonstrations": -1},
            "task.options.demonstrations=-1: must be a whole number of at least 0",
        ),
        (
            "chain_sum",
            {"sise": 3},
            "task.options.sise: unknown option of task 'gym:chain_sum'; did you mean 'size'?",
        ),
    ],
)
def test_invalid_gym_tasks_are_refused(kind: str, options, expected: str):
    assert refusal(f"gym:{kind}", **options).startswith(expected)


def test_thousands_of_questions_come_in_one_piece():
    config = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    questions, draws = draw_questions("chain_sum", config, 0, 4000, avoid=[], answer="boxed")
    assert len({one.question for one in questions}) == 4000 < draws
    # more than a message of the verifier's may have, so that this shows
    assert sum(len(one.question) + len(json.dumps(one.entry)) for one in questions) > LONGEST_MESSAGE
