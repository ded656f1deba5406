"""``gym_retries:NAME``: the questions of ``gym:NAME``, with feedback and further attempts."""

from __future__ import annotations

import pytest

from hacrl.types import Turn
from tests.tasks.helpers import build, refusal
from tests.tasks.test_bundled import play

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'hacrl[gym]')")
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
OPTIONS = {"size": 60, "test_size": 10, "config": SUMS}
ASKED = "Give the final answer within \\boxed{}."


def say(*texts: str) -> list[Turn]:
    return [Turn("assistant", text) for text in texts]


@pytest.fixture(scope="module")
def task():
    options = {"attempts": 3, "discount": 0.5, "system": "Add.", "demonstrations": 1}
    task = build("gym_retries:chain_sum", **options, **OPTIONS)
    yield task
    task.close()


def test_the_questions_are_those_of_the_one_turn_task(task):
    one_turn = build("gym:chain_sum", system="Add.", demonstrations=1, **OPTIONS)
    for split, own in ((task.train, one_turn.train), (task.test, one_turn.test)):
        assert {one.prompt for one in split} == {one.prompt for one in own}
    assert task.train[0].context == one_turn.train[0].context
    assert task.train[0].context[0] == Turn("system", "Add.")
    assert task.episode_limits.max_turns == 3
    one_turn.close()


def test_attempts_feedback_and_rewards(task):
    problem = task.test[0]
    right, wrong = f"\\boxed{{{problem.answer}}}", "\\boxed{999}"
    with task.open_environments() as pool:
        assert play(pool, problem, say(right)) == (["", ""], 1.0, True)
        # One wrong answer: 0.5 to the power of 1; two: 0.25.
        answers, reward, done = play(pool, problem, say(wrong, right))
        assert answers[1] == f"That is not right. 2 attempts are left. {ASKED}"
        assert (reward, done) == (0.5, True)
        answers, reward, done = play(pool, problem, say("I give up", wrong, right))
        assert answers[1:3] == [
            f"No answer was found. 2 attempts are left. {ASKED}",
            f"That is not right. One attempt is left. {ASKED}",
        ]
        assert (reward, done) == (0.25, True)
        assert play(pool, problem, say(wrong, wrong, wrong))[1:] == (0.0, True)


def test_a_scorer_that_raises_counts_as_wrong(monkeypatch: pytest.MonkeyPatch, task):
    from hacrl.tasks.gym import retried_question

    def broken(*_: object) -> bool:
        raise RuntimeError("odd answer")

    monkeypatch.setattr(retried_question, "is_correct", broken)
    question = retried_question.GymQuestion("chain_sum", SUMS, 0, "boxed", 2, 1.0)
    question.reset(**task.test[0].fields)
    assert question.step("\\boxed{1}")[1:] == (0.0, False)


def test_wrong_options_are_explained():
    assert refusal("gym_retries:chain_sum", attempts=0).startswith("task.options.attempts=0: must be a whole")
    assert refusal("gym_retries:chain_sum", discount=2).startswith("task.options.discount=2: must be")
    assert "unknown option" in refusal("gym_retries:chain_sum", max_turns=2)
    assert "did you mean 'chain_sum'" in refusal("gym_retries:chain_sun", **OPTIONS)
