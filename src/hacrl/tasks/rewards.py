"""Any prompts, judged by Python reward functions with the signature TRL's trainers use."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.data import DataOption, check_columns, load_table
from hacrl.tasks.reward_functions import (
    PURPOSES,
    LoopThread,
    NamedFunction,
    PromptReader,
    RewardFunction,
    outcome_of,
)
from hacrl.tasks.splits import check_count, check_test_share, make_splits
from hacrl.types import Problem, Rollout, Turn, Verdict

_SAMPLES = (r"The answer is \boxed{0}.", "")  # what self_test() asks about


class RewardTask:
    """Prompts from a data set, and functions that give each response a number.

    A function is called as ``f(prompts=..., completions=..., completion_ids=..., **columns)`` with one entry
    per response and returns one number each, or None where it does not apply; with several functions the
    reward is their weighted sum. ``reward_range`` tells what rewards can be; one outside of it is an error.
    """

    def __init__(
        self,
        *,
        functions: str | RewardFunction | Sequence[str | RewardFunction],
        train: DataOption,
        test: DataOption | None = None,
        test_share: float | None = None,
        weights: Sequence[float] | None = None,
        columns: Mapping[str, str] | None = None,
        reward_range: Sequence[float] | None = None,
        limit: int | None = None,
        name: str = "reward",
    ) -> None:
        self.name = name
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not listed:
            raise TaskError("functions: give at least one")
        self._functions = [NamedFunction(function) for function in listed]
        self._weights = _checked_weights(weights, len(listed))
        self._range = _checked_range(reward_range)
        self.max_reward: float | None = None if self._range is None else self._range[1]
        share = check_test_share(test_share, test, default=0.0)
        check_count("limit", limit)
        reader = PromptReader(check_columns(columns, PURPOSES))
        asked = reader.candidates(load_table("train", train))
        held_out = None if test is None else reader.candidates(load_table("test", test))
        self._conversational = bool(reader.conversational)
        self._python_columns = reader.python_columns
        splits = make_splits(asked, held_out, test_share=share, limit=limit)
        self._train, self._test, self.notes = splits.train, splits.test, splits.notes
        self._loop = LoopThread()

    @property
    def train(self) -> Sequence[Problem]:
        """Problems that may be used for learning, in a fixed shuffled order."""
        return self._train

    @property
    def test(self) -> Sequence[Problem]:
        """Held-out problems, in a fixed shuffled order; empty without ``test`` or ``test_share``."""
        return self._test

    def verify(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        """Every response's reward. Raises only for what a reward function does wrong."""
        if not rollouts:
            return []
        problems = [rollout.problem for rollout in rollouts]
        rewards = self._rewards(
            problems,
            [rollout.text for rollout in rollouts],
            [list(rollout.token_ids) for rollout in rollouts],
        )
        return [Verdict(reward, "scored") for reward in rewards]

    def self_test(self) -> None:
        """Call every function once with two made-up completions, so that a broken one is found early."""
        problems = [self._train[0], self._train[min(1, len(self._train) - 1)]]
        self._rewards(problems, list(_SAMPLES), [[0, 1, 2], []])

    def close(self) -> None:
        """End the thread that awaits ``async`` functions, if there is one."""
        self._loop.close()

    def _rewards(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[float]:
        per_function = self._call_all(self._arguments(problems, texts, token_ids), {
            "completions_ids": token_ids,  # its name in TRL's documentation, not in its code
            "log_extra": _ignore,
            "log_metric": _ignore,
        }, len(texts))  # fmt: skip
        return [self._total([values[i] for values in per_function]) for i in range(len(texts))]

    def _arguments(
        self, problems: Sequence[Problem], texts: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any]:
        rows = [self._python_columns.get(problem.id, problem.fields) for problem in problems]
        columns = dict.fromkeys(key for row in rows for key in row)
        return {
            "prompts": [self._prompt(problem) for problem in problems],
            "completions": [self._completion(text) for text in texts],
            "completion_ids": token_ids,
            **{key: [row.get(key) for row in rows] for key in columns},
            "trainer_state": None,
        }

    def _prompt(self, problem: Problem) -> str | list[dict[str, str]]:
        if not self._conversational:
            return problem.prompt
        turns = (*problem.context, Turn("user", problem.prompt))
        return [{"role": turn.role, "content": turn.content} for turn in turns]

    def _completion(self, text: str) -> str | list[dict[str, str]]:
        return [{"role": "assistant", "content": text}] if self._conversational else text

    def _call_all(
        self, arguments: Mapping[str, Any], extras: Mapping[str, Any], count: int
    ) -> list[list[float | None]]:
        results: list[Any] = []
        try:
            for function in self._functions:
                results.append(function.start(arguments, extras))
        except TaskError:
            for result in results:
                if inspect.iscoroutine(result):
                    result.close()  # nobody will await it
            raise
        waiting = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if waiting:
            outcomes = self._loop.gather([outcome_of(results[index]) for index in waiting])
            for index, outcome in zip(waiting, outcomes, strict=True):
                if isinstance(outcome, (Exception, SystemExit)):
                    raise self._functions[index].raised(outcome) from outcome
                results[index] = outcome
        return [
            function.checked(values, count) for function, values in zip(self._functions, results, strict=True)
        ]

    def _total(self, values: Sequence[float | None]) -> float:
        if all(value is None for value in values):
            names = ", ".join(function.name for function in self._functions)
            raise TaskError(
                f"reward functions {names} all returned None for the same response; "
                "at least one must give it a number"
            )
        total = sum(
            weight * value for weight, value in zip(self._weights, values, strict=True) if value is not None
        )
        if self._range is not None:
            low, high = self._range
            if not low - 1e-6 <= total <= high + 1e-6:  # weighted sums round
                raise TaskError(
                    f"reward_range={[low, high]}: the reward functions gave {total}; widen the range, "
                    "or correct the functions"
                )
        return total


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for TRL's logging callbacks."""


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0] * count
    if not isinstance(weights, list | tuple) or len(weights) != count:
        raise TaskError(f"weights={weights!r}: give {count}, one for each of functions")
    return [_finite("weights", weights, weight) for weight in weights]


def _checked_range(reward_range: Sequence[float] | None) -> tuple[float, float] | None:
    if reward_range is None:
        return None
    if not isinstance(reward_range, list | tuple) or len(reward_range) != 2:
        raise TaskError(f"reward_range={reward_range!r}: give two numbers, [smallest, largest]")
    low, high = (_finite("reward_range", reward_range, end) for end in reward_range)
    if not low < high:
        raise TaskError(f"reward_range={reward_range!r}: the first must be smaller than the second")
    return low, high


def _finite(option: str, given: Any, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TaskError(f"{option}={given!r}: {value!r} is not a finite number")
    return float(value)
