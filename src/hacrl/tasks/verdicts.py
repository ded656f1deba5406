"""Check the rewards and verdicts that users' code gives: whatever it returns, an error names the problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from hacrl.config.values import shown
from hacrl.errors import TaskError
from hacrl.tasks.base import Task
from hacrl.types import Problem, Rollout, Verdict, VerdictLabel

# Standard deviations square rewards, and sums run over all responses of a step: both must stay finite.
LARGEST_REWARD = 1e100
LABELS = get_args(VerdictLabel)


def as_number(value: Any) -> float | None:
    """Return a number of any library as a float; None for what is no number, e.g. text or several numbers.

    A number too large for a float is infinite.
    """
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except Exception:  # the type is the user's: its conversion may raise anything
        return None


def why_unusable(reward: float) -> str | None:
    """Return why a reward cannot be computed with; None if it can."""
    if not math.isfinite(reward):
        return "rewards must be finite"
    if abs(reward) > LARGEST_REWARD:
        return f"rewards must be between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}"
    return None


def shown_problem(problem: Problem) -> str:
    """Return a problem for an error message: the beginning and the end of its prompt."""
    return f"problem {shown(problem.prompt)}"


def checked_verdicts(task: Task, rollouts: Sequence[Rollout], verdicts: Any) -> list[Verdict]:
    """Return a task's verdicts, one per rollout, with float rewards. Raise TaskError for anything else."""
    if not isinstance(verdicts, Sequence) or len(verdicts) != len(rollouts):
        given = len(verdicts) if isinstance(verdicts, Sequence) else type(verdicts).__name__
        raise TaskError(
            f"task {task.name!r} gave {given} verdicts on {len(rollouts)} responses; it must give one each"
        )
    return [_checked(task, *pair) for pair in zip(rollouts, verdicts, strict=True)]


def _checked(task: Task, rollout: Rollout, verdict: Any) -> Verdict:
    wrong: str | None
    if not isinstance(verdict, Verdict):
        wrong = f"{shown(verdict)}, which is not a hacrl.types.Verdict"
    elif verdict.label not in LABELS:
        wrong = f"the verdict {shown(verdict.label)}, which is none of {', '.join(LABELS)}"
    elif (reward := as_number(verdict.reward)) is None:
        wrong = f"the reward {shown(verdict.reward)}, which is not a number"
    elif (why := why_unusable(reward)) is not None:
        wrong = f"the reward {shown(verdict.reward)}; {why}"
    else:
        return verdict if type(verdict.reward) is float else replace(verdict, reward=reward)
    raise TaskError(f"task {task.name!r} gave a response to {shown_problem(rollout.problem)} {wrong}")
