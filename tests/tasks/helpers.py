"""Short ways to build a task and a response in these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hacrl.config.schema import TaskSettings
from hacrl.errors import TaskError
from hacrl.tasks.registry import make_task
from hacrl.types import Problem, Rollout

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"  # beside the checkout; not everywhere
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="no shared/data beside the checkout")


def build(name: str, **options: Any) -> Any:
    """The task, through the registry as a run does it."""
    return make_task(TaskSettings(name=name, options=options))


def refusal(name: str, **options: Any) -> str:
    """What the user reads instead of a task."""
    with pytest.raises(TaskError) as caught:
        build(name, **options)
    return str(caught.value)


def rollout_of(problem: Problem, text: str, token_ids: tuple[int, ...] = (5, 6)) -> Rollout:
    """An agent's response to a problem."""
    return Rollout.single_turn(problem, "ada", text, token_ids, tuple(-0.5 for _ in token_ids), "stop", 0, "")
