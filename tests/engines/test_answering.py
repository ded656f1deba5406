"""Responses are verified while others are still being generated, and the verdicts are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hacrl.config.schema import TaskSettings
from hacrl.engines.answering import Answerer, verify_rollouts
from hacrl.engines.base import GenerationRequest, OnFinished, Sample
from hacrl.errors import TaskError
from hacrl.tasks.registry import make_task
from hacrl.tasks.rewards import RewardTask
from hacrl.types import Rollout, Sampling, Verdict
from tests.support.rollouts import rollout
from tests.support.sevens import SevensTask, problem
from tests.support.tiny import char_agent

AGENT = char_agent()
TEXTS = ("71", "1", "", "17", "777", "0")
ROLLOUTS = [rollout(AGENT, text) for text in TEXTS]
REWARDS = [1, 0, 0, 1, 1, 0]  # of SevensTask: a response with a 7 is right
SECONDS = 30  # a hang guard


class ScriptedEngine:
    """Gives the responses of a script; finishes them when and in the order that the script says."""

    def __init__(
        self,
        texts: Sequence[str],
        order: Sequence[int],
        after_each: Callable[[int], object] = lambda _: None,
    ) -> None:
        self.policy = AGENT
        self._samples = [
            Sample(found.token_ids, found.token_logprobs) for found in (rollout(AGENT, t) for t in texts)
        ]
        self._order = order
        self._after_each = after_each

    def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
        assert on_finished is not None
        assert request.num_samples == len(self._samples)
        for index in self._order:
            on_finished([(index, self._samples[index])])
            self._after_each(index)
        return self._samples


class WatchedTask(SevensTask):
    """Remembers in which batches and threads it was called."""

    def __init__(self, singly: bool) -> None:
        super().__init__()
        self.independent_verdicts = singly
        self.batches: list[list[str]] = []
        self.threads: set[int] = set()
        self.judged = threading.Semaphore(0)

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        self.batches.append([found.text for found in rollouts])
        self.threads.add(threading.get_ident())
        verdicts = super().verify(rollouts)
        for _ in rollouts:
            self.judged.release()
        return verdicts


def answer(engine: Any, task: Any, asked: Any = None) -> list[Any]:
    """Two problems and three responses to each."""
    problems = asked or [problem("1:"), problem("2:")]
    answerer = Answerer(AGENT, engine, task)
    return answerer.answer(problems, 6 // len(problems), Sampling(4), seed=0)


def rewards(verified: Sequence[Any]) -> list[float]:
    return [found.reward for found in verified]


def verify_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hacrl-verify"]


def test_a_response_is_verified_before_the_next_one_finishes() -> None:
    task = WatchedTask(singly=True)
    order = (3, 0, 5, 1, 4, 2)

    def wait_for_verdict(_: int) -> None:
        assert task.judged.acquire(timeout=SECONDS)

    verified = answer(ScriptedEngine(TEXTS, order, wait_for_verdict), task)
    assert task.batches == [[TEXTS[index]] for index in order]
    assert threading.get_ident() not in task.threads
    assert [found.rollout.text for found in verified] == list(TEXTS)
    assert [found.rollout.problem.prompt for found in verified] == ["1:"] * 3 + ["2:"] * 3
    assert rewards(verified) == REWARDS


def test_responses_that_finish_together_are_verified_once_each() -> None:
    task = WatchedTask(singly=True)
    verified = answer(ScriptedEngine(TEXTS, tuple(reversed(range(6)))), task)
    assert rewards(verified) == REWARDS
    assert sorted(text for batch in task.batches for text in batch) == sorted(TEXTS)
    assert verify_threads() == []


def test_a_reward_function_sees_all_responses_at_once_in_the_callers_thread() -> None:
    task = WatchedTask(singly=False)
    verified = answer(ScriptedEngine(TEXTS, range(6)), task)
    assert task.batches == [list(TEXTS)]
    assert task.threads == {threading.get_ident()}
    assert rewards(verified) == REWARDS


def test_answerers_that_share_a_lock_do_not_call_the_task_at_the_same_time() -> None:
    inside, most = [], []

    class Task(WatchedTask):
        def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
            inside.append(1)
            most.append(len(inside))
            both_began.wait(0.2)
            inside.pop()
            return super().verify(rollouts)

    both_began, lock, task = threading.Event(), threading.Lock(), Task(singly=True)
    answerers = [Answerer(AGENT, ScriptedEngine(TEXTS, range(6)), task, lock) for _ in range(2)]
    generated = [a.generate([problem("1:")], 6, Sampling(4), seed=0) for a in answerers]
    found = [a.verify(rollouts) for a, rollouts in zip(answerers, generated, strict=True)]
    assert [rewards(verified) for verified in found] == [REWARDS, REWARDS]
    assert len(most) >= 2
    assert max(most) == 1


class FailingTask(WatchedTask):
    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        if any(found.text == "17" for found in rollouts):
            raise TaskError("17 cannot be judged")
        return super().verify(rollouts)


@pytest.mark.parametrize("singly", [True, False])
def test_an_error_of_the_task_is_raised_after_generation(singly: bool) -> None:
    finished: list[int] = []
    with pytest.raises(TaskError, match="17 cannot be judged"):
        answer(ScriptedEngine(TEXTS, range(6), finished.append), FailingTask(singly))
    assert finished == [0, 1, 2, 3, 4, 5]  # the engine was not disturbed
    assert verify_threads() == []


def test_an_engine_that_fails_leaves_no_thread() -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(ScriptedEngine(TEXTS, range(6), fail), WatchedTask(singly=True))
    assert verify_threads() == []


def test_an_engine_that_fails_drops_what_is_waiting_for_the_task() -> None:
    may_verify, began = threading.Event(), threading.Event()

    class SlowTask(WatchedTask):
        def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
            began.set()
            assert may_verify.wait(SECONDS)
            return super().verify(rollouts)

    def fail_at_last(index: int) -> None:
        assert began.wait(SECONDS)  # the first response is with the task, the others wait
        if index == 5:
            threading.Timer(0.2, may_verify.set).start()  # when the others have been dropped
            raise KeyboardInterrupt

    task = SlowTask(singly=True)
    with pytest.raises(KeyboardInterrupt):
        answer(ScriptedEngine(TEXTS, range(6), fail_at_last), task)
    assert task.batches == [[TEXTS[0]]]


def test_an_answerer_can_be_used_again_after_a_failure() -> None:
    def fail(_: int) -> None:
        raise KeyboardInterrupt

    task = WatchedTask(singly=True)
    answerer = Answerer(AGENT, ScriptedEngine(TEXTS, range(6), fail), task)
    with pytest.raises(KeyboardInterrupt):
        answerer.answer([problem("1:")], 6, Sampling(4), seed=0)
    answerer.engine = ScriptedEngine(TEXTS, range(6))
    assert rewards(answerer.answer([problem("1:")], 6, Sampling(4), seed=0)) == REWARDS


def test_responses_that_finish_after_a_failure_are_not_verified() -> None:
    """As from the thread of an engine that is still generating when another agent's engine has failed."""

    class Engine(ScriptedEngine):
        def generate(self, request: GenerationRequest, on_finished: OnFinished | None = None) -> list[Sample]:
            finished.append(on_finished)
            return super().generate(request, on_finished)

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    finished: list[Any] = []
    task = WatchedTask(singly=True)
    answerer = Answerer(AGENT, Engine(["1"] * 6, range(6), fail), task)
    with pytest.raises(KeyboardInterrupt):
        answerer.answer([problem("1:")], 6, Sampling(4), seed=0)
    task.batches.clear()
    late = answerer.engine._samples[0]
    finished[0]([(0, late)])
    assert verify_threads() == []
    answerer.engine = ScriptedEngine(TEXTS, range(6), lambda _: finished[0]([(0, late)]))
    assert rewards(answerer.answer([problem("1:")], 6, Sampling(4), seed=0)) == REWARDS
    assert sorted(text for batch in task.batches for text in batch) == sorted(TEXTS)


def test_a_real_reward_function_is_called_once() -> None:
    calls: list[list[str]] = []

    def longest(completions: list[str], **_: object) -> list[float]:
        calls.append(completions)
        return [float(text == max(completions, key=len)) for text in completions]

    task = RewardTask(functions=longest, train=[{"prompt": "1:"}])
    assert rewards(answer(ScriptedEngine(TEXTS, range(6)), task, task.train)) == [0, 0, 0, 0, 1, 0]
    assert calls == [list(TEXTS)]


def test_a_real_verifier_is_called_early() -> None:
    arithmetic = make_task(TaskSettings(name="arithmetic"))
    asked = arithmetic.train[0]
    right = f"#{asked.answer}"
    engine = ScriptedEngine([right, "#0", "1", right, "7", "0"], (1, 0, 2, 5, 4, 3))
    verified = answer(engine, arithmetic, [asked])
    assert rewards(verified) == [1, 0, 0, 1, 0, 0]
    assert verified == verify_rollouts(arithmetic, [found.rollout for found in verified])
    assert arithmetic.independent_verdicts
    arithmetic.close()
