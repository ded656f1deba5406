"""Responses are judged while others are still being generated, and the verdicts are the same."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from hacrl.config.schema import TaskSettings
from hacrl.engines.hf.engine import TransformersEngine
from hacrl.engines.judging import Judging, ask_and_judge, verify_rollouts
from hacrl.errors import TaskError
from hacrl.tasks.registry import make_task
from hacrl.tasks.rewards import RewardTask
from hacrl.types import Rollout, Sampling, Verdict
from tests.support.rollouts import rollout
from tests.support.sevens import SevensTask
from tests.support.tiny import char_agent

AGENT = char_agent()
SAID = [rollout(AGENT, text) for text in ("71", "1", "", "17", "777", "0")]
SECONDS = 30  # a hang guard


class Watched(SevensTask):
    """Remembers in which batches and threads it judged."""

    def __init__(self, singly: bool) -> None:
        super().__init__()
        self.independent_verdicts = singly
        self.batches: list[list[Rollout]] = []
        self.threads: set[int] = set()
        self.judged = threading.Semaphore(0)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        self.batches.append(list(rollouts))
        self.threads.add(threading.get_ident())
        found = super().verify(rollouts)
        for _ in rollouts:
            self.judged.release()
        return found


def test_a_response_is_judged_before_the_next_one_has_come() -> None:
    task = Watched(singly=True)
    with Judging(task) as judging:
        for place in (3, 0, 5, 1, 4, 2):  # as they happen to end
            judging.take("ada", place, SAID[place])
            assert task.judged.acquire(timeout=SECONDS)  # judged while generation goes on
        verified = judging.verdicts("ada", SAID)
    assert task.batches == [[SAID[place]] for place in (3, 0, 5, 1, 4, 2)]
    assert threading.get_ident() not in task.threads
    assert verified == verify_rollouts(SevensTask(), SAID)
    assert [v.reward for v in verified] == [1, 0, 0, 1, 1, 0]


def test_responses_that_come_at_once_are_judged_each_once() -> None:
    task = Watched(singly=True)
    with Judging(task) as judging:
        for place in reversed(range(6)):
            judging.take("ada", place, SAID[place])
        verified = judging.verdicts("ada", SAID)
    assert [v.rollout for v in verified] == SAID
    assert [v.reward for v in verified] == [1, 0, 0, 1, 1, 0]
    assert sorted(r.text for batch in task.batches for r in batch) == sorted(r.text for r in SAID)


def test_agents_that_answer_side_by_side_are_told_apart() -> None:
    task = Watched(singly=True)
    with Judging(task) as judging:
        for place in range(3):
            judging.take("bob", place, SAID[place + 3])
            judging.take("ada", place, SAID[place])
        verified = {
            agent: judging.verdicts(agent, said) for agent, said in (("ada", SAID[:3]), ("bob", SAID[3:]))
        }
    assert [v.reward for v in verified["ada"]] == [1, 0, 0]
    assert [v.reward for v in verified["bob"]] == [1, 1, 0]
    assert len(task.threads) == 1


def test_a_reward_function_sees_all_responses_of_an_agent_at_once() -> None:
    task = Watched(singly=False)
    with Judging(task) as judging:
        for place, one in enumerate(SAID):
            judging.take("ada", place, one)
        assert task.batches == []
        verified = judging.verdicts("ada", SAID)
    assert task.batches == [SAID]
    assert task.threads == {threading.get_ident()}
    assert [v.reward for v in verified] == [1, 0, 0, 1, 1, 0]


def test_an_engine_that_tells_nothing_is_judged_all_the_same() -> None:
    task = Watched(singly=True)
    with Judging(task) as judging:
        assert [v.reward for v in judging.verdicts("ada", SAID)] == [1, 0, 0, 1, 1, 0]
        assert task.batches == [SAID]


class Failing(Watched):
    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        if any(r.text == "17" for r in rollouts):
            raise TaskError("17 cannot be judged")
        return super().verify(rollouts)


@pytest.mark.parametrize("singly", [True, False])
def test_an_error_of_the_task_is_raised_where_verdicts_are_asked_for(singly: bool) -> None:
    task = Failing(singly)
    with Judging(task) as judging:
        for place, one in enumerate(SAID):
            judging.take("ada", place, one)  # an engine's loop is not disturbed
            assert not (singly and place == 0) or task.judged.acquire(timeout=SECONDS)
        with pytest.raises(TaskError, match="17 cannot be judged"):
            judging.verdicts("ada", SAID)


def test_leaving_early_leaves_no_thread() -> None:
    def take_and_fail(judging: Judging) -> None:
        judging.take("ada", 0, SAID[0])
        raise KeyboardInterrupt

    task = Watched(singly=True)
    with pytest.raises(KeyboardInterrupt), Judging(task) as judging:
        take_and_fail(judging)
    assert not any(thread.name == "hacrl-judging" for thread in threading.enumerate())


def test_leaving_early_judges_no_more_than_is_under_way() -> None:
    may_judge, begun = threading.Event(), threading.Event()

    class Slow(Watched):
        def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
            begun.set()
            assert may_judge.wait(SECONDS)
            return super().verify(rollouts)

    task = Slow(singly=True)

    def take_all_and_fail(judging: Judging) -> None:
        judging.take("ada", 0, SAID[0])
        assert begun.wait(SECONDS)
        for place in range(1, 6):
            judging.take("ada", place, SAID[place])
        threading.Timer(0.2, may_judge.set).start()  # when the others have been dropped
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Judging(task) as judging:
        take_all_and_fail(judging)
    assert task.batches == [[SAID[0]]]


def test_a_real_reward_function_is_called_once_and_a_real_verifier_judges_ahead() -> None:
    calls: list[list[str]] = []

    def longest(completions: list[str], **_: object) -> list[float]:
        calls.append(completions)
        return [float(text == max(completions, key=len)) for text in completions]

    with Judging(RewardTask(functions=longest, train=[{"prompt": "1:"}])) as judging:
        for place, one in enumerate(SAID):
            judging.take("ada", place, one)
        assert [v.reward for v in judging.verdicts("ada", SAID)] == [0, 0, 0, 0, 1, 0]
    assert calls == [[one.text for one in SAID]]

    arithmetic = make_task(TaskSettings(name="arithmetic"))
    problem = arithmetic.train[0]
    answers = [
        Rollout.single_turn(problem, "ada", text, (1,), (-1.0,), "stop", 0, "")
        for text in (f"#{problem.answer}", "#0")
    ]
    with Judging(arithmetic) as judging:
        judging.take("ada", 1, answers[1])
        judging.take("ada", 0, answers[0])
        assert judging.verdicts("ada", answers) == verify_rollouts(arithmetic, answers)
    assert arithmetic.independent_verdicts
    arithmetic.close()


def test_an_evaluation_is_judged_while_it_goes_on() -> None:
    """An engine that goes on when its first response has been judged, and no earlier."""
    task = Watched(singly=True)

    class Patient(TransformersEngine):
        def generate(self, problems, samples_per_prompt, sampling, seed, on_finished=None):
            for place, one in enumerate(SAID):
                on_finished(place, one)
                assert task.judged.acquire(timeout=SECONDS)
            return list(SAID)

    verified = ask_and_judge(Patient(AGENT), task, [], 6, Sampling(4), 0)
    assert [v.reward for v in verified] == [1, 0, 0, 1, 1, 0]
    assert task.batches == [[one] for one in SAID]  # each was told of, in order
    assert threading.get_ident() not in task.threads
