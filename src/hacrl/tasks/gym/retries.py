"""The ``gym_retries:NAME`` tasks: a task of reasoning-gym in which a wrong answer may be tried again.

Questions, answer formats and scoring are those of ``gym:NAME``. After a wrong answer the environment says so,
and the agent answers again in the same conversation, until it is right or has no attempt left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hacrl.config.schema import VerifierSettings
from hacrl.errors import TaskError
from hacrl.plugins import check_options
from hacrl.tasks.environment import EnvironmentTask
from hacrl.tasks.gym.task import GymTask
from hacrl.tasks.splits import check_count
from hacrl.types import Problem

_GIVEN = ("environment", "train", "test", "test_share", "columns", "name", "limits", "max_turns", "system")


def gym_retries_task(
    kind: str,
    /,
    *,
    attempts: int = 3,
    discount: float = 1.0,
    size: int = 1000,
    test_size: int = 100,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    answer: str = "boxed",
    prompt: str | None = None,
    system: str | None = None,
    demonstrations: int | Sequence[Any] = 0,
    verifier: VerifierSettings | None = None,
    **options: Any,
) -> EnvironmentTask:
    """Return the task ``gym_retries:KIND``; further options are those of the ``environment`` task.

    ``verifier`` limits the time and memory of the scorer, as in ``gym:KIND``.
    """
    name = f"gym_retries:{kind}"
    check_count("attempts", attempts)
    if isinstance(discount, bool) or not isinstance(discount, int | float) or not 0 <= discount <= 1:
        raise TaskError(f"discount={discount!r}: must be a number from 0 to 1")
    check_options(
        f"task {name!r}", EnvironmentTask, options, key="task.options", given=_GIVEN, error_type=TaskError
    )
    asked = GymTask(
        kind,
        size=size,
        test_size=test_size,
        seed=seed,
        config=config,
        answer=answer,
        prompt=prompt,
        system=system,
        demonstrations=demonstrations,
    )
    settings = verifier or VerifierSettings()
    environment = {
        "kind": kind,
        "config": dict(config or {}),
        "seed": seed,
        "answer": answer,
        "attempts": attempts,
        "discount": float(discount),
    }
    task = EnvironmentTask(
        environment={"factory": "hacrl.tasks.gym.retried_question:GymQuestion", "options": environment},
        train=[_row(problem) for problem in asked.train],
        test=[_row(problem) for problem in asked.test] or None,
        max_turns=attempts,
        limits={"call_seconds": settings.time_limit, "memory": settings.memory_limit},
        name=name,
        **options,
    )
    task.notes = (*asked.notes, *task.notes)
    return task


def _row(problem: Problem) -> dict[str, Any]:
    """Return a row for the ``environment`` task: the conversation, the answer and reasoning-gym's record."""
    turns = [{"role": turn.role, "content": turn.content} for turn in problem.context]
    prompt = [*turns, {"role": "user", "content": problem.prompt}] if turns else problem.prompt
    return {"prompt": prompt, "answer": problem.answer, "entry": problem.fields["entry"]}
