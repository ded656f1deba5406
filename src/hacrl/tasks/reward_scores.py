"""Weigh and add the values that reward functions give to responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.errors import TaskError
from hacrl.tasks.reward_functions import RewardFunction, RewardFunctions
from hacrl.tasks.reward_log import RewardLog
from hacrl.tasks.verdicts import shown_problem, why_unusable
from hacrl.types import Problem, Verdict


class RewardScorer:
    """Calls reward functions on responses, and adds their values to verdicts.

    ``own_rewards`` are names of further rewards of weight 1, which the caller gives with the responses.
    """

    def __init__(
        self,
        functions: Sequence[str | RewardFunction],
        weights: Sequence[float] | None,
        reward_range: Sequence[float] | None,
        own_rewards: Sequence[str] = (),
    ) -> None:
        self._functions = RewardFunctions(functions)
        self._own = tuple(own_rewards)
        self._weights = [*_checked_weights(weights, len(functions)), *[1.0] * len(self._own)]
        self._range = _checked_range(reward_range)
        self.max_reward: float | None = None if self._range is None else self._range[1]

    def verdicts(
        self,
        problems: Sequence[Problem],
        arguments: Mapping[str, Any],
        token_ids: Sequence[Sequence[int]],
        own_values: Sequence[Sequence[float | None]] = (),
    ) -> list[Verdict]:
        """Return one verdict per response.

        ``arguments`` are the functions' keyword arguments, each with one entry per response. ``own_values``:
        the values of each of the ``own_rewards``.
        """
        log = RewardLog(len(problems))
        extras = {"completions_ids": token_ids}  # its name in TRL's documentation, not in its code
        values = self._functions.call({**arguments, **log.arguments}, extras, problems)
        names = [*self._functions.short_names, *self._own]
        metrics = log.metrics
        return [
            Verdict(
                self._total(of_response, problem),
                "scored",
                dict(zip(names, of_response, strict=True)),
                log.columns_of(i),
                metrics,
            )
            for i, (problem, of_response) in enumerate(
                zip(problems, zip(*values, *own_values, strict=True), strict=True)
            )
        ]

    def close(self) -> None:
        """End the thread that awaits ``async`` functions, if there is one."""
        self._functions.close()

    def _total(self, values: Sequence[float | None], problem: Problem) -> float:
        names = ", ".join([*self._functions.names, *self._own])
        if all(value is None for value in values):
            raise TaskError(
                f"reward functions {names} all returned None for the same response to "
                f"{shown_problem(problem)}; at least one must give it a number"
            )
        total = sum(
            weight * value for weight, value in zip(self._weights, values, strict=True) if value is not None
        )
        if (why := why_unusable(total)) is not None:
            raise TaskError(
                f"reward functions {names} with weights {self._weights} gave {total:g} for a response to "
                f"{shown_problem(problem)}; {why}"
            )
        if self._range is not None:
            low, high = self._range
            if not low - 1e-6 <= total <= high + 1e-6:  # rounding of the weighted sum
                raise TaskError(
                    f"reward_range={[low, high]}: the reward functions gave {total} for a response to "
                    f"{shown_problem(problem)}; widen the range, or correct the functions"
                )
        return total


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
