"""What is done of a step that is not finished: enough to go on with it, in this process or in a later one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hacrl.learning.reports import LearnReport, RetokeniseReport, SourceReport
from hacrl.types import Problem, Rollout, Verdict, VerifiedRollout


@dataclass
class StepUnderWay:
    """Rollouts of the agents that have answered, reports of those that have learnt."""

    step: int
    rollouts: dict[str, list[VerifiedRollout]] = field(default_factory=dict)
    learnt: dict[str, LearnReport] = field(default_factory=dict)

    @property
    def phases(self) -> int:
        """How many agents' phases are done."""
        return len(self.rollouts) + len(self.learnt)

    def as_json(self) -> dict[str, Any]:
        """Plain values; every number comes back as it was."""
        return {
            "step": self.step,
            "rollouts": {
                agent: [_rollout_json(one) for one in verified] for agent, verified in self.rollouts.items()
            },
            "learnt": {agent: asdict(report) for agent, report in self.learnt.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], problems: Sequence[Problem]) -> StepUnderWay:
        """What :meth:`as_json` gave; ``problems`` are the step's."""
        by_id = {problem.id: problem for problem in problems}
        return cls(
            step=int(data["step"]),
            rollouts={
                agent: [_rollout(one, agent, by_id) for one in listed]
                for agent, listed in data["rollouts"].items()
            },
            learnt={agent: _report(one) for agent, one in data["learnt"].items()},
        )


def _rollout_json(verified: VerifiedRollout) -> dict[str, Any]:
    rollout, verdict = verified.rollout, verified.verdict
    return {
        "problem": rollout.problem.id,
        "text": rollout.text,
        "token_ids": list(rollout.token_ids),
        "token_logprobs": list(rollout.token_logprobs),
        "finish_reason": rollout.finish_reason,
        "policy_version": rollout.policy_version,
        "reward": verdict.reward,
        "label": verdict.label,
    }


def _rollout(data: Mapping[str, Any], agent: str, problems: Mapping[str, Problem]) -> VerifiedRollout:
    rollout = Rollout(
        problem=problems[data["problem"]],
        agent=agent,
        text=data["text"],
        token_ids=tuple(data["token_ids"]),
        token_logprobs=tuple(data["token_logprobs"]),
        finish_reason=data["finish_reason"],
        policy_version=data["policy_version"],
    )
    return VerifiedRollout(rollout, Verdict(data["reward"], data["label"]))


def _report(data: Mapping[str, Any]) -> LearnReport:
    """A learner's report from plain values; its parts are records again."""
    values = {one.name: data[one.name] for one in fields(LearnReport) if one.name in data}
    values["sources"] = {name: SourceReport(**one) for name, one in data["sources"].items()}
    values["retokenised"] = {name: RetokeniseReport(**one) for name, one in data["retokenised"].items()}
    return LearnReport(**values)
