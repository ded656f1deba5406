"""Ask, then judge: the step from an engine to verified rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from hacrl.tasks.base import Task
from hacrl.types import Rollout, VerifiedRollout


def verify_rollouts(task: Task, rollouts: Sequence[Rollout]) -> list[VerifiedRollout]:
    """Every rollout with the task's verdict."""
    verdicts = task.verify(rollouts)
    return [VerifiedRollout(rollout, verdict) for rollout, verdict in zip(rollouts, verdicts, strict=True)]
