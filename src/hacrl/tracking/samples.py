"""Rows for a tracker's table of rollouts: the first response to each of the first problems of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from hacrl.plain_text import json_text, printable
from hacrl.rollouts.conversation import conversation
from hacrl.types import Problem, Verdict, VerifiedRollout


@dataclass(frozen=True)
class RolloutRow:
    """One row of the table of rollouts."""

    step: int
    agent: str
    reward: float
    verdict: str
    prompt: str
    answer: str  # the gold answer, if the task has one
    response: str
    tokens: int
    details: str = ""  # rewards by function and columns of log_extra, as JSON

    @property
    def values(self) -> list[str | int | float]:
        """The row's values in the order of :data:`COLUMNS`."""
        return list(astuple(self))


COLUMNS = [field.name for field in fields(RolloutRow)]


def sample_rows(step: int, agent: str, rollouts: Sequence[VerifiedRollout], count: int) -> list[RolloutRow]:
    """Return at most ``count`` rows, each of another problem."""
    first_per_problem: dict[str, VerifiedRollout] = {}
    for verified in rollouts:
        first_per_problem.setdefault(verified.rollout.problem.id, verified)
    return [_row(step, agent, verified) for verified in list(first_per_problem.values())[:count]]


def as_text(rows: Sequence[RolloutRow]) -> str:
    """Return the rows as plain text."""
    blocks = [
        f"--- step {row.step} · {row.agent} · reward {row.reward:g} · {row.verdict} · {row.tokens} tokens\n"
        f"--- prompt\n{row.prompt}\n--- answer\n{row.answer}\n--- response\n{row.response}\n"
        + (f"--- details\n{row.details}\n" if row.details else "")
        for row in rows
    ]
    return printable("\n".join(blocks), multiline=True)


def _row(step: int, agent: str, verified: VerifiedRollout) -> RolloutRow:
    rollout, verdict = verified.rollout, verified.verdict
    return RolloutRow(
        step=step,
        agent=agent,
        reward=verdict.reward,
        verdict=verdict.label,
        prompt=_conversation(rollout.problem),
        answer=rollout.problem.answer,
        response=rollout.text if rollout.episode is None else conversation(rollout.segments),
        tokens=rollout.num_tokens,
        details=_details(verdict),
    )


def _details(verdict: Verdict) -> str:
    """Return what the reward functions gave and logged, if there is more to say than the reward."""
    several = {"rewards": dict(verdict.rewards)} if len(verdict.rewards) > 1 else {}
    details = {**several, **verdict.columns}
    return json_text(details) if details else ""


def _conversation(problem: Problem) -> str:
    """Return the prompt; if there are earlier turns, all turns with their roles."""
    if not problem.context:
        return problem.prompt
    turns = [f"[{turn.role}]\n{turn.content}" for turn in problem.context]
    return "\n".join([*turns, f"[user]\n{problem.prompt}"])
